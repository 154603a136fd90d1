"""An engine without a model that computes one token of every running request when told, and replicas over it.

Tokens depend on all tokens before them: a stream that goes on elsewhere and lost or repeated one would say other things
from there on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from deployment.parcels import Accepted, LineDepth, Parcel, Pinned, Rejected
from deployment.replica import Replica, ReplicaReport
from orca_core.channel import Channel, Outbox
from orca_core.errors import EngineDeadError, OrcaError, OverloadedError, RequestCancelledError, UnavailableError
from orca_core.types import (
    CancelOutcome,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Health,
    Load,
    ModelInfo,
    Timings,
    Usage,
)

INFO = ModelInfo("inner-name", "FakeForCausalLM", "float32", 1000, 64, 128, (2,), True)


def answer_of(request: GenerationRequest) -> list[int]:
    """All the output tokens of a request, as one undisturbed engine would generate them."""
    return [token_after(request, n) for n in range(request.max_new_tokens)]


def token_after(request: GenerationRequest, n_output: int) -> int:
    value = request.seed
    for token_id in request.token_ids:
        value = (value * 31 + token_id) % 1_000_003
    for number in range(n_output + 1):
        value = (value * 37 + number + 1) % 1_000_003
    return value % 1000


@dataclass
class Running:
    request: GenerationRequest
    channel: Channel
    n_output: int


class SteppingEngine:
    """Admits what fits, at once; computes when ``step`` is called."""

    def __init__(self, n_slots: int = INFO.n_slots, max_batch_size: int = 16) -> None:
        self.n_slots = n_slots
        self.max_batch_size = max_batch_size
        self.running: dict[str, Running] = {}
        self.seen: list[GenerationRequest] = []
        self.outbox = Outbox()
        self.iterations = 0
        self.well = Health(True)
        self.error: OrcaError | None = None  # raised by submit
        self.bad_ids: dict[str, Exception] = {}  # raised by submit of that request
        self.cancelled: list[str] = []
        self.started = self.ended = False

    def start(self) -> None:
        self.started = True

    def info(self) -> ModelInfo:
        return ModelInfo("inner-name", "FakeForCausalLM", "float32", 1000, 64, self.n_slots, (2,), True)

    def submit(self, request: GenerationRequest) -> Channel:
        if self.error is not None:
            raise self.error
        if request.request_id in self.bad_ids:
            raise self.bad_ids[request.request_id]
        if request.total_tokens > self.load().headroom or len(self.running) >= self.max_batch_size:
            raise OverloadedError("full", 1.0)
        self.seen.append(request)
        channel = Channel(request.request_id, self.cancel)
        self.running[request.request_id] = Running(request, channel, len(request.emitted_ids))
        return channel

    def cancel(self, request_id: str) -> CancelOutcome:
        running = self.running.pop(request_id, None)
        self.cancelled.append(request_id)
        if running is None:
            return CancelOutcome.NOT_FOUND
        self.outbox.fail(running.channel, RequestCancelledError(request_id))
        self.outbox.flush()
        return CancelOutcome.CANCELLED

    def step(self) -> None:
        """One iteration."""
        self.iterations += bool(self.running)
        for request_id, running in list(self.running.items()):
            request, number = running.request, running.n_output
            token_id = token_after(request, number)
            running.n_output += 1
            is_last = running.n_output == request.max_new_tokens
            chunk = GenerationChunk(request_id, f"{token_id} ", (token_id,))
            if is_last:
                usage = Usage(len(request.token_ids), running.n_output)
                chunk = GenerationChunk(
                    request_id,
                    chunk.text,
                    chunk.token_ids,
                    (),
                    FinishReason.LENGTH,
                    None,
                    usage,
                    Timings(0.1, 0.2, 0.3),
                )
                del self.running[request_id]
            self.outbox.put(running.channel, chunk)
        self.outbox.flush()

    def die(self) -> None:
        """The loop thread is gone; the process is not."""
        self.well = Health(False, "the engine loop died")
        self.error = EngineDeadError("the engine loop died")
        for running in self.running.values():
            self.outbox.fail(running.channel, self.error)
        self.running.clear()
        self.outbox.flush()

    def load(self) -> Load:
        reserved = sum(running.request.total_tokens for running in self.running.values())
        used = sum(len(running.request.token_ids) + running.n_output for running in self.running.values())
        return Load(
            n_slots=self.n_slots,
            reserved_slots=reserved,
            used_slots=used,
            running=len(self.running),
            iterations=self.iterations,
        )

    def health(self) -> Health:
        return self.well

    def close(self, drain_timeout_s: float = 0.0) -> None:
        self.ended = True


class FarStream:
    """The stream of a replica in another process: it can stall, and it can break."""

    def __init__(self, far: FarReplica, ingress_id: str, link_id: str) -> None:
        self.far = far
        self.arrived: asyncio.Queue[Parcel | Exception | None] = asyncio.Queue()
        self.task = asyncio.get_running_loop().create_task(self._carry(ingress_id, link_id))
        self.n_parcels = 0
        far.streams.append(self)

    async def _carry(self, ingress_id: str, link_id: str) -> None:
        await self.far.answers.wait()
        async with aclosing(self.far.replica.attach(Pinned(self.far.name), ingress_id, link_id)) as parcels:
            async for parcel in parcels:
                await self.far.answers.wait()
                self.arrived.put_nowait(parcel)
        self.arrived.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Parcel]:
        while (item := await self.arrived.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self.n_parcels += 1
            yield item

    def cancel(self) -> None:
        if self.far.answers.is_set():
            self.task.cancel()
        else:
            self.far.when_thawed.append(self.task.cancel)


class FarReplica:
    """A real ``Replica`` over a stepping engine, as if it were in another process that can be killed and frozen."""

    def __init__(
        self,
        name: str,
        n_slots: int = INFO.n_slots,
        max_batch_size: int = 16,
        clock: Callable[[], float] | None = None,
        heartbeat_s: float = 3600.0,
    ) -> None:
        self.name = name
        self.engine = SteppingEngine(n_slots, max_batch_size)
        monotonic = clock or (lambda: asyncio.get_running_loop().time())
        self.replica = Replica(self.engine, name, lambda: 0.0, heartbeat_s=heartbeat_s, monotonic=monotonic)
        self.is_dead = False
        self.streams: list[FarStream] = []
        self.when_thawed: list[Callable[[], object]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.submit_waits: asyncio.Event | None = None  # a slow network, on the way there
        self.answer_waits: asyncio.Event | None = None  # or back
        self.n_submits = 0
        self.submit_error: Exception | None = None

    def freeze(self) -> None:
        """SIGSTOP."""
        self.answers.clear()

    def thaw(self) -> None:
        """SIGCONT: what was sent meanwhile arrives."""
        self.answers.set()
        for act in self.when_thawed:
            act()
        self.when_thawed.clear()

    def kill(self) -> None:
        """SIGKILL."""
        self.is_dead = True
        self.thaw()
        for stream in self.streams:
            stream.task.cancel()
            stream.arrived.put_nowait(ConnectionError("the actor died"))

    @property
    def runs(self) -> bool:
        return self.answers.is_set() and not self.is_dead


@dataclass
class FarReplicas:
    """``ReplicaSet`` over far replicas. ``names``: those that Serve has in its set; others may still be running."""

    all: dict[str, FarReplica] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    streams: list[FarStream] = field(default_factory=list)
    drops: list[tuple[str, ...]] = field(default_factory=list)
    paces: list[tuple[str, float]] = field(default_factory=list)
    n_reports: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    n_firsts: int = 0  # calls that wait, or have waited, for the first replica
    n_waiting: int = 0

    def add(self, *replicas: FarReplica) -> None:
        for replica in replicas:
            self.all[replica.name] = replica
            self.names.add(replica.name)
        self.came.set()

    async def first(self) -> None:
        self.n_firsts += 1
        self.n_waiting += 1
        try:
            while not self.names:
                self.came.clear()
                await self.came.wait()
        finally:
            self.n_waiting -= 1

    async def reports(self, ingress_id: str, line: LineDepth) -> list[ReplicaReport]:
        self.n_reports += 1
        asked = [self.all[name] for name in sorted(self.names)]
        return [await far.replica.report(ingress_id, line) for far in asked if far.runs]

    def attach(self, replica: str, ingress_id: str, link_id: str) -> FarStream:
        self.streams.append(FarStream(self.all[replica], ingress_id, link_id))
        return self.streams[-1]

    async def submit(
        self, replica: str, link_id: str, request: GenerationRequest, client_request_id: str
    ) -> Accepted | Rejected:
        if replica not in self.names:
            raise UnavailableError("the replica has left")
        far = self.all[replica]
        far.n_submits += 1
        if far.submit_waits is not None:
            await far.submit_waits.wait()
        await far.answers.wait()
        if far.is_dead:
            raise ConnectionError("the actor died")
        if far.submit_error is not None:
            raise far.submit_error
        answer = far.replica.submit(request, link_id, client_request_id)
        if far.answer_waits is not None:
            await far.answer_waits.wait()
        return answer

    def drop(self, replica: str, link_id: str, request_ids: tuple[str, ...]) -> None:
        self.drops.append(request_ids)
        task = asyncio.get_running_loop().create_task(self._drop(self.all[replica], link_id, request_ids))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def pace(self, replica: str, link_id: str, interval_s: float) -> None:
        self.paces.append((replica, interval_s))
        told = self.all[replica].replica.pace(Pinned(replica), link_id, interval_s)
        task = asyncio.get_running_loop().create_task(told)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _drop(self, far: FarReplica, link_id: str, request_ids: tuple[str, ...]) -> None:
        await far.answers.wait()
        if not far.is_dead:
            await far.replica.drop(Pinned(far.name), link_id, request_ids)

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        outcomes = [await self.all[name].replica.cancel(client_request_id) for name in sorted(self.names)]
        return CancelOutcome.CANCELLED if CancelOutcome.CANCELLED in outcomes else CancelOutcome.NOT_FOUND

    def close(self) -> None:
        for far in self.all.values():
            far.thaw()
        for task in (*self.tasks, *(stream.task for stream in self.streams)):
            task.cancel()
