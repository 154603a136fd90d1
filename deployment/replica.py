"""A replica: one Ray actor that owns exactly one engine. Plain classes; ``app.py`` binds them to Serve."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from deployment.metrics import RayRegistry, ReplicaMetrics, Silent
from deployment.router import load_to_stats
from deployment.scaling_reports import scaling_stats
from orca_core.config import EngineConfig
from orca_core.errors import EngineDeadError, RequestCancelledError
from orca_core.types import CancelOutcome, GenerationChunk, GenerationRequest, Health, Load, ModelInfo

N_REMEMBERED: Final = 4096
"""How many ended client ids a replica can still tell from unknown ones."""

LINE_FRESH_S: Final = 5.0
"""What an ingress said of its line counts for so long: one that has died must not leave a queue behind."""


class EngineChannel(Protocol):
    """What a replica reads from: see ``orca_core.channel.Channel``."""

    def __aiter__(self) -> AsyncIterator[GenerationChunk]: ...

    def close(self) -> None:
        """The reader leaves; a request that has not ended is cancelled."""


class ReplicaEngine(Protocol):
    """What a replica needs of an engine: see ``orca_core.engine.Engine``."""

    def start(self) -> object:
        """Load the model and start; may take minutes."""

    def info(self) -> ModelInfo:
        """The model."""
        ...

    def submit(self, request: GenerationRequest) -> EngineChannel:
        """Begin a request."""
        ...

    def cancel(self, request_id: str) -> CancelOutcome:
        """End a request."""
        ...

    def load(self) -> Load:
        """Slots and counts."""
        ...

    def health(self) -> Health:
        """Whether it makes progress."""
        ...

    def close(self, drain_timeout_s: float = 0.0) -> None:
        """End everything."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself. ``taken_at``: wall-clock seconds."""

    replica: str
    info: ModelInfo
    load: Load
    taken_at: float


class Replica:
    """Serves one engine. Every method runs on the actor's event loop; ``name`` is unique in the service.

    ``clock``: wall-clock seconds (reports of replicas are compared across processes).
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        name: str,
        clock: Callable[[], float] = time.time,
        metrics: ReplicaMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._name = name
        self._clock = clock
        self._metrics = metrics or ReplicaMetrics(Silent(), name)
        self._live: dict[str, set[str]] = {}  # a client's own id -> our ids: several requests may share it
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._abandoned: OrderedDict[str, None] = OrderedDict()
        self._lines: dict[str, tuple[int, int, float]] = {}  # ingress -> slots, requests, when it said so

    async def start(self) -> None:
        """Load the model (this may take minutes) beside the event loop, so that the actor still answers Serve."""
        await asyncio.to_thread(self._engine.start)

    async def generate(
        self, request: GenerationRequest, client_request_id: str
    ) -> AsyncGenerator[tuple[str, GenerationChunk], None]:
        """Run one request; yields this replica's name with each chunk.

        Chunks are coalesced while the reader is busy; the first comes as soon as it exists. Leaving early, by whatever
        way, cancels the request in the engine. Raises the request's ``OrcaError``.
        """
        if request.request_id in self._abandoned:
            raise RequestCancelledError(request.request_id)
        channel = self._engine.submit(request)
        self._live.setdefault(client_request_id, set()).add(request.request_id)
        try:
            async for chunk in channel:
                if chunk.timings is not None:
                    self._metrics.queue_time(chunk.timings.queue_s)
                yield self._name, chunk
        finally:
            channel.close()
            self._forget(client_request_id, request.request_id)

    def _forget(self, client_request_id: str, request_id: str) -> None:
        live = self._live[client_request_id]
        live.discard(request_id)
        if not live:
            del self._live[client_request_id]
        self._ended[client_request_id] = None
        self._ended.move_to_end(client_request_id)
        while len(self._ended) > N_REMEMBERED:
            self._ended.popitem(last=False)

    async def abandon(self, request_id: str) -> CancelOutcome:
        """Nobody reads that request (our id) any more: end it, or refuse it should it arrive only now.

        Serve's own cancellation can get lost while a request is on its way to a replica.
        """
        self._abandoned[request_id] = None
        while len(self._abandoned) > N_REMEMBERED:
            self._abandoned.popitem(last=False)
        return self._engine.cancel(request_id)

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Cancel every live request that was started with the client's own id."""
        live = self._live.get(client_request_id, ())
        outcomes = [self._engine.cancel(request_id) for request_id in tuple(live)]
        if CancelOutcome.CANCELLED in outcomes:
            return CancelOutcome.CANCELLED
        known = bool(live) or client_request_id in self._ended
        return CancelOutcome.ALREADY_FINISHED if known else CancelOutcome.NOT_FOUND

    async def report(self) -> ReplicaReport:
        """The replica's model and its load now."""
        return ReplicaReport(self._name, self._engine.info(), self._engine.load(), self._clock())

    async def record_routing_stats(self) -> dict[str, float]:
        """Polled by Serve, whether there is work or not, and handed to every router."""
        load = self._engine.load()
        self._metrics.load(load)
        return load_to_stats(load, self._clock())

    async def note_line(self, ingress: str, slots: int, requests: int) -> None:
        """An ingress says what waits in its own line, before any replica: demand in slots, and requests.

        It tells all replicas, at least every ``LINE_FRESH_S`` while something waits: the autoscaler sees what the
        replicas report, and nothing of an ingress.
        """
        self._lines[ingress] = (slots, requests, self._clock())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Polled by Serve where the number of replicas may change, and handed to the policy in the controller."""
        oldest = self._clock() - LINE_FRESH_S
        self._lines = {ingress: line for ingress, line in self._lines.items() if line[2] >= oldest}
        lines = self._lines.values()
        return scaling_stats(self._engine.load(), sum(line[0] for line in lines), sum(line[1] for line in lines))

    async def check_health(self) -> None:
        """Polled by Serve, which replaces the actor when this raises ``EngineDeadError``: no life, or no progress."""
        health = self._engine.health()
        if not health.ok:
            raise EngineDeadError(health.reason)

    def close(self) -> None:
        """End the engine. Serve has waited for open streams by now (``graceful_shutdown_timeout_s``)."""
        self._engine.close()


class ServedReplica(Replica):
    """A replica as Serve constructs it: from plain, picklable values, with the engine loaded when it is done."""

    async def __init__(self, engine_config: EngineConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        use_threads(engine_config.threads)
        from orca_core.engine import Engine  # not before the thread count is set: torch reads it when it is imported

        name = serve.get_replica_context().replica_id.unique_id
        metrics = ReplicaMetrics(RayRegistry(), name)
        engine = Engine(replace(engine_config, memory_share=share_of_node()), on_iteration=metrics.on_iteration)
        Replica.__init__(self, engine, name, metrics=metrics)
        await self.start()

    def __del__(self) -> None:
        # Serve calls this once the streams have been drained; it may also run on an object whose constructor failed
        engine: Any = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


def share_of_node() -> float:
    """Part of its node that the actor has, above 0 and at most 1: its CPUs of those Ray has there.

    Ray never gives out more CPUs than a node has, so the shares of all actors on it add up to 1 at most, and RAM that
    is divided by them is not promised twice.
    """
    import ray

    context: Any = ray.get_runtime_context()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    mine = float(context.get_assigned_resources().get("CPU", 0.0))
    node_id = context.get_node_id()
    there = next((node["Resources"].get("CPU", 0.0) for node in nodes if node["NodeID"] == node_id), 0.0)
    return min(1.0, mine / there) if mine > 0 and there > 0 else 1.0


def use_threads(threads: int | None) -> None:
    """Limit the thread pools of the numeric libraries of this process to ``threads``; ``None`` leaves them alone."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
