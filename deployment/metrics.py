"""The metrics of the service: what there is, who records it, and the one place where Ray's own are made.

Prometheus sees each name behind Ray's prefix (``ray_orca_requests_total``), with Ray's labels for node and worker.
Nothing here is called for a token: once a request, an iteration, or a report of load.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

from orca_core.iterations import Iteration
from orca_core.types import Load, Usage

_log = logging.getLogger(__name__)

Record = Callable[..., None]
"""``record(value, **tags)``: add to a counter, set a gauge, observe with a histogram."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. ``boundaries``: upper bounds of a histogram's buckets, in its unit."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    description: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


class Registry(Protocol):
    """Makes metrics; tests have one of their own."""

    def make(self, spec: Spec) -> Record:
        """How values of that metric are recorded."""
        ...


class Silent:
    """Records nothing: for classes that run outside of Serve."""

    def make(self, spec: Spec) -> Record:
        """See ``Registry.make``."""
        return lambda *_, **__: None


class RayRegistry:
    """Ray's metrics. Recording is a call into Ray's core of some microseconds."""

    def make(self, spec: Spec) -> Record:
        """See ``Registry.make``."""
        from ray.util import metrics

        if spec.kind == "histogram":
            histogram = metrics.Histogram(spec.name, spec.description, list(spec.boundaries), spec.tags)
            return lambda value, **tags: histogram.observe(value, tags)
        if spec.kind == "gauge":
            gauge = metrics.Gauge(spec.name, spec.description, spec.tags)
            return lambda value, **tags: gauge.set(value, tags)
        counter = metrics.Counter(spec.name, spec.description, spec.tags)
        return lambda value, **tags: counter.inc(value, tags) if value > 0 else None


RECORD_WITHIN_S: Final = 0.1
"""How long a value may wait before Ray hears of it, which exports every few seconds."""


class Deferred:
    """Another registry's metrics, recorded a little later where an event loop runs: no token waits for a metric."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: list[Callable[[], None]] = []

    def make(self, spec: Spec) -> Record:
        """See ``Registry.make``. What is recorded never raises on an event loop."""
        record = self._registry.make(spec)

        def later(value: float, **tags: str) -> None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                record(value, **tags)
                return
            self._waiting.append(partial(record, value, **tags))
            if len(self._waiting) == 1:  # in a context of its own: Serve ties things to that of a request
                loop.call_later(RECORD_WITHIN_S, self._record, context=Context())

        return later

    def _record(self) -> None:
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            try:
                record()
            except Exception:
                _log.exception("a metric is not recorded")


_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUESTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_TOKENS: Final = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

INGRESS_SPECS: Final = (
    Spec("counter", "orca_requests_total", "Requests that have ended: outcome is stop, length, cancelled, deadline or "
         "error; api is grpc or http.", ("outcome", "api")),
    Spec("counter", "orca_rejected_total", "Requests refused before their first token, by the code of the error; those "
         "without a key, and choices of one call that do not fit together, are no requests.", ("reason",)),
    Spec("counter", "orca_failed_total", "Requests that ended with an error and were not refused, by the code of the "
         "error: the service's own failures.", ("reason",)),
    Spec("counter", "orca_prompt_tokens_total", "Prompt tokens of finished requests: the sum of their usages."),
    Spec("counter", "orca_generated_tokens_total", "Generated tokens of finished requests: the sum of their usages."),
    Spec("counter", "orca_prefix_cache_hit_tokens_total", "Prompt tokens of finished requests that were cached."),
    Spec("counter", "orca_failovers_total", "Streams that went on with another replica after theirs was lost."),
    Spec("histogram", "orca_time_to_first_token_seconds", "From the arrival of a request at the ingress to its first "
         "token there.", (), _SECONDS),
    Spec("histogram", "orca_time_per_output_token_seconds", "Mean time between two tokens of a finished request.", (),
         _SHORT_SECONDS),
    Spec("histogram", "orca_request_seconds", "From the arrival of a request at the ingress to its end.", (), _SECONDS),
    Spec("histogram", "orca_queue_time_seconds", "From a finished request's arrival at the ingress to its first slots.",
         (), _SECONDS),
    Spec("gauge", "orca_load_report_age_seconds", "Age of the chosen replica's load report when the ingress last chose "
         "one."),
)  # fmt: skip
_LOAD_SPECS: Final = {
    "n_slots": Spec("gauge", "orca_slots_total", "Slots of the replica: tokens whose K and V fit.", ("replica",)),
    "reserved_slots": Spec("gauge", "orca_slots_reserved", "Slots promised to admitted requests.", ("replica",)),
    "used_slots": Spec("gauge", "orca_slots_used", "Slots that hold the K and V of a token.", ("replica",)),
    "queued_slots": Spec("gauge", "orca_queued_slots", "Demand of the requests that wait for slots; nearly all do in "
                         "an ingress.", ("replica",)),
    "waiting": Spec("gauge", "orca_waiting_requests", "Requests that wait for slots; nearly all do in an ingress.",
                    ("replica",)),
    "running": Spec("gauge", "orca_running_requests", "Requests that have their slots.", ("replica",)),
    "headroom": Spec("gauge", "orca_headroom_slots", "Slots a new request could have; negative behind a long queue.",
                     ("replica",)),
}  # fmt: skip
_ITERATION_SPECS: Final = (
    Spec("counter", "orca_iterations_total", "Iterations of the engine that succeeded.", ("replica",)),
    Spec("histogram", "orca_iteration_seconds", "Duration of an iteration.", ("replica",), _SHORT_SECONDS),
    Spec("histogram", "orca_iteration_requests", "Requests in the batch of an iteration.", ("replica",), _REQUESTS),
    Spec("histogram", "orca_iteration_tokens", "Tokens (rows) in the batch of an iteration.", ("replica",), _TOKENS),
)

SPECS: Final = (*INGRESS_SPECS, *_LOAD_SPECS.values(), *_ITERATION_SPECS)
"""Every metric there is."""

LINE: Final = "ingress"
"""What stands for the replica where requests wait in an ingress: the sum over all labels is all that waits."""


class IngressMetrics:
    """What an ingress records, at most a few times a request."""

    def __init__(self, registry: Registry) -> None:
        records = {spec.name: registry.make(spec) for spec in INGRESS_SPECS}
        self._requests = records["orca_requests_total"]
        self._rejected = records["orca_rejected_total"]
        self._failed = records["orca_failed_total"]
        self._prompt_tokens = records["orca_prompt_tokens_total"]
        self._generated_tokens = records["orca_generated_tokens_total"]
        self._hit_tokens = records["orca_prefix_cache_hit_tokens_total"]
        self._failovers = records["orca_failovers_total"]
        self._ttft = records["orca_time_to_first_token_seconds"]
        self._tpot = records["orca_time_per_output_token_seconds"]
        self._request_seconds = records["orca_request_seconds"]
        self._queue_time = records["orca_queue_time_seconds"]
        self._report_age = records["orca_load_report_age_seconds"]
        self._waiting = registry.make(_LOAD_SPECS["waiting"])
        self._queued = registry.make(_LOAD_SPECS["queued_slots"])

    def first_token(self, seconds: float) -> None:
        """``seconds`` since the request arrived."""
        self._ttft(seconds)

    def finished(self, usage: Usage, tpot_s: float | None) -> None:
        """A request finished by itself. ``tpot_s``: ``None`` where it had one token."""
        self._prompt_tokens(usage.prompt_tokens)
        self._generated_tokens(usage.completion_tokens)
        self._hit_tokens(usage.cached_prompt_tokens)
        if tpot_s is not None:
            self._tpot(tpot_s)

    def ended(self, outcome: str, api: str, seconds: float) -> None:
        """A request has ended, whichever way, ``seconds`` after it arrived."""
        self._requests(1, outcome=outcome, api=api)
        self._request_seconds(seconds)

    def rejected(self, reason: str) -> None:
        """Somebody was refused. ``reason``: the code of the error."""
        self._rejected(1, reason=reason)

    def failed(self, reason: str) -> None:
        """A request ended with an error that is no refusal. ``reason``: the code of the error."""
        self._failed(1, reason=reason)

    def queue_time(self, seconds: float) -> None:
        """A finished request had waited so long for its first slots."""
        self._queue_time(seconds)

    def chosen(self, report_age_s: float) -> None:
        """A replica was chosen that had said so many seconds ago how it stands."""
        self._report_age(report_age_s)

    def line(self, requests: int, slots: int) -> None:
        """What waits in the ingress. Called while nothing waits too, so that the gauges come back to zero."""
        self._waiting(requests, replica=LINE)
        self._queued(slots, replica=LINE)

    def failed_over(self) -> None:
        """A stream goes on with another replica."""
        self._failovers(1)


MOST_UNRECORDED: Final = 1000
"""Iterations that may wait to be recorded, should the event loop not come to it."""


class ReplicaMetrics:
    """What a replica records. ``on_iteration`` is called by the loop thread, all else by the event loop."""

    def __init__(self, registry: Registry, replica: str) -> None:
        self._tags: Mapping[str, Any] = {"replica": replica}
        self._gauges = {name: registry.make(spec) for name, spec in _LOAD_SPECS.items()}
        self._iterations, self._seconds, self._requests, self._tokens = map(registry.make, _ITERATION_SPECS)
        self._unrecorded: deque[Iteration] = deque()
        self._broken = False

    def on_iteration(self, iteration: Iteration) -> None:
        """An observer of iterations. Only kept here, see ``iterations``: the device waits for the loop thread."""
        self._unrecorded.append(iteration)
        if len(self._unrecorded) > MOST_UNRECORDED:
            self.iterations()

    def iterations(self) -> None:
        """Record the iterations there have been since the last call. Never raises."""
        try:
            for _ in range(len(self._unrecorded)):
                iteration = self._unrecorded.popleft()
                self._iterations(1, **self._tags)
                self._seconds(iteration.seconds, **self._tags)
                self._requests(len(iteration.parts), **self._tags)
                self._tokens(iteration.n_tokens, **self._tags)
        except IndexError:  # another thread was faster
            pass
        except Exception:
            if not self._broken:
                _log.exception("iterations are not recorded")
            self._broken = True

    def load(self, load: Load) -> None:
        """The replica's load now. Called while it is idle too, so that the gauges come back to zero."""
        for name, gauge in self._gauges.items():
            gauge(getattr(load, name), **self._tags)
