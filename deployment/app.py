"""``build(config)``: the application as Ray Serve runs it. The only file that names ``serve.deployment``.

No ``from __future__ import annotations`` here: with it Serve cannot see the builder's type and hands it a plain dict.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployment.autoscaling import QueueDepthPolicy
from deployment.config import AppConfig
from deployment.router import PinnedRouter
from deployment.served_ingress import ServedIngress
from deployment.served_replica import ServedReplica

UNLIMITED: Final = 100_000
"""Ongoing requests Serve allows an actor: so many that slots are the limit, not Serve."""

HEALTH_CHECK_PERIOD_S: Final = 5.0
HEALTH_CHECK_TIMEOUT_S: Final = 15.0
SCALING_REPORTS: Final = 4.0
"""The autoscaler believes the last report of a replica for that many intervals, and Serve keeps it as long."""
SCALING_PATIENCE_S: Final = 4.0
"""But no shorter than this: a busy machine reports late."""


def build(config: AppConfig) -> Application:
    """The application of a config: an ingress in front of replicas with one engine each.

    ``serve run``, ``serve deploy`` and KubeRay find it as ``deployment.app:build`` and parse ``args`` into
    ``AppConfig``. A mapping is taken too. Raises ``ConfigError``.
    """
    given: object = config
    parsed = given if isinstance(given, AppConfig) else AppConfig.parse(cast("Mapping[str, Any]", given))
    return application(parsed, ServedReplica)


def application(config: AppConfig, replica_class: type[ServedReplica]) -> Application:
    """The same with replicas of another class, whose ``make_engine`` makes another engine."""
    replicas = serve.deployment(**replica_options(config))(replica_class).bind(
        config.engine_config(), config.replicas.load_report_interval_s
    )
    ingress_class = serve.ingress()(ServedIngress)
    return serve.deployment(**ingress_options(config))(ingress_class).bind(config, replicas)


def replica_options(config: AppConfig) -> dict[str, Any]:
    """How Serve runs the replicas."""
    replicas = config.replicas
    routing: dict[str, Any] = {"request_router_class": PinnedRouter}
    return {
        "name": "Replica",
        "ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        "max_ongoing_requests": UNLIMITED,
        "request_router_config": RequestRouterConfig(**routing),
        **_life(config),
        **_scale(config),
    }


def ingress_options(config: AppConfig) -> dict[str, Any]:
    """How Serve runs the ingress."""
    return {
        "name": "Ingress",
        "num_replicas": config.ingress.replicas,
        "ray_actor_options": {"num_cpus": config.ingress.num_cpus},
        "max_ongoing_requests": UNLIMITED,
        **_life(config),
    }


def _life(config: AppConfig) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": max(config.drain.timeout_s, 0.1),
        "graceful_shutdown_wait_loop_s": min(0.2, max(config.drain.timeout_s, 0.1)),
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    }


def _scale(config: AppConfig) -> Mapping[str, Any]:
    replicas, scaling = config.replicas, config.autoscaling
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.max}
    decisions: dict[str, Any] = {
        "interval_s": scaling.interval_s,
        "target_ratio": scaling.target_queued_slots_ratio,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "stale_after_s": max(SCALING_REPORTS * scaling.interval_s, SCALING_PATIENCE_S),
        "max_batch_size": config.engine.max_batch_size,
    }
    make_policy: Any = AutoscalingPolicy  # its constructor is untyped
    policy = make_policy(policy_function=QueueDepthPolicy, policy_kwargs=decisions)
    with warnings.catch_warnings():
        # the only way to set the interval of one deployment's reports; Serve means to leave it to the environment
        warnings.simplefilter("ignore", DeprecationWarning)
        autoscaling = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            initial_replicas=replicas.start,
            metrics_interval_s=scaling.interval_s,
            look_back_period_s=SCALING_REPORTS * scaling.interval_s,
            # Serve would wait on top of what our policy has waited
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )
    # Serve chooses who leaves by node and age, not by load: whoever it is must be able to finish what it has begun
    finish_s = max(config.drain.timeout_s, config.limits.max_request_seconds)
    return {"autoscaling_config": autoscaling, "graceful_shutdown_timeout_s": finish_s}
