"""Replicas over stepping engines, as if they were in other processes that can be killed and frozen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from deployment.parcels import Accepted, LineDepth, Parcel, Pinned, Rejected, ReplicaReport
from deployment.replica import Replica
from orca_core.errors import UnavailableError
from orca_core.types import CancelOutcome, GenerationRequest
from tests.deployment.stepping import INFO, SteppingEngine


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
