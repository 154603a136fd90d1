"""What a config means for the parts of an ingress."""

from __future__ import annotations

from collections.abc import Callable

from deployment.config import AppConfig
from deployment.dispatch_settings import DispatchSettings
from deployment.dispatcher import Dispatcher
from deployment.headroom import HeadroomBook
from deployment.metrics import IngressMetrics
from deployment.replica_set import ReplicaSet
from deployment.resuming import StreamSettings


def dispatcher_of(
    config: AppConfig, replicas: ReplicaSet, clock: Callable[[], float], metrics: IngressMetrics
) -> Dispatcher:
    """The line and the links of one ingress. ``clock``: seconds, monotonic."""
    engine, limits = config.engine, config.limits
    settings = DispatchSettings(
        interval_s=config.replicas.load_report_interval_s,
        silence_s=config.failover.silence_s,
        max_waiting_requests=limits.max_waiting_requests,
        max_waiting_slots=limits.max_waiting_slots,
        overtaking_s=engine.overtaking_s,
        max_overtakers=engine.max_overtakers,
        from_zero=config.replicas.cold_requests if config.replicas.min == 0 else None,
        coalesce_s=config.ingress.coalesce_s,
    )
    return Dispatcher(replicas, settings, HeadroomBook(clock, engine.max_batch_size), clock, metrics)


def stream_settings_of(config: AppConfig) -> StreamSettings:
    """What holds for every stream."""
    backlog = config.limits.max_stream_backlog
    return StreamSettings(config.failover.max_resumes, backlog, affinity=config.engine.prefix_cache)
