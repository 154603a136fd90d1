"""A dispatcher over replicas in the test's hand, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

from deployment.config_sections import ColdRequests
from deployment.dispatch_settings import DispatchSettings
from deployment.dispatcher import Dispatcher
from deployment.headroom import HeadroomBook
from deployment.metrics import IngressMetrics, Silent
from deployment.resuming import ResumingStream, StreamSettings
from deployment.serving import ServedChunk
from orca_core.types import GenerationRequest
from tests.deployment.far_replicas import FarReplica, FarReplicas

INTERVAL_S = 0.5
SILENCE_S = 5.0


class Clock:
    def __init__(self, now: float = 50.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    """Let everything happen that can happen without time passing."""
    for _ in range(30):
        await asyncio.sleep(0)


class Client:
    """Reads one stream to its end, in a task."""

    def __init__(self, stream: ResumingStream) -> None:
        self.stream = stream
        self.got: list[ServedChunk] = []
        self.error: BaseException | None = None
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            async for resumed in self.stream:
                self.got.append(resumed)
                await self.reads.wait()
        except Exception as error:
            self.error = error

    @property
    def tokens(self) -> list[int]:
        return [token_id for resumed in self.got for token_id in resumed.chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(resumed.chunk.text for resumed in self.got)

    @property
    def finished(self) -> bool:
        return bool(self.got) and self.got[-1].chunk.finish_reason is not None


class Plane:
    """One ingress's part: its dispatcher and its clients. Several may share the replicas."""

    def __init__(
        self, replicas: FarReplicas, clock: Clock, *, max_requests: int = 64, max_slots: int = 10_000, seed: int = 1,
        max_batch_size: int = 16, max_resumes: int = 3, max_backlog: int = 1000, prefix: str = "r",
        overtaking_s: float = 0.0, max_overtakers: int = 0, from_zero: ColdRequests | None = None,
    ) -> None:  # fmt: skip
        self.prefix = prefix
        self.replicas = replicas
        self.clock = clock
        self.book = HeadroomBook(clock, max_batch_size, random.Random(seed), stale_after_s=1e9)
        self.dispatcher = Dispatcher(
            replicas,
            DispatchSettings(INTERVAL_S, SILENCE_S, max_requests, max_slots, overtaking_s, max_overtakers, from_zero),
            self.book,
            clock,
            IngressMetrics(Silent()),
        )
        self.settings = StreamSettings(max_resumes, max_backlog)
        self.clients: list[Client] = []
        self.n_requests = 0

    async def poll(self) -> None:
        await self.dispatcher.poll()
        await settle()

    def stream(
        self, n_prompt: int = 4, n_output: int = 6, timeout_s: float = 1000.0, first_id: int = 0, **given: Any
    ) -> ResumingStream:
        self.n_requests += 1
        name = f"{self.prefix}{self.n_requests}"
        first_id = first_id or self.n_requests
        ids = tuple(range(first_id, first_id + n_prompt))
        request = GenerationRequest(name, ids, n_output, self.n_requests)
        now = self.clock.now
        return ResumingStream(
            request, f"client-{name}", self.dispatcher, self.settings, self.clock,
            on_resume=lambda: None, arrived_at=now, deadline=now + timeout_s, **given,
        )  # fmt: skip

    def ask(self, *args: Any, **given: Any) -> Client:
        """Open a stream and begin to read it. Raises what opening raises."""
        stream = self.stream(*args, **given)
        stream.open()
        self.clients.append(Client(stream))
        return self.clients[-1]

    async def step(self, n_iterations: int = 1) -> None:
        """Iterations of every replica that runs; what they say arrives."""
        await settle()
        for _ in range(n_iterations):
            for far in self.replicas.all.values():
                if far.runs:
                    far.engine.step()
            await settle()

    async def beat(self) -> None:
        """A heartbeat of every replica that runs."""
        for far in self.replicas.all.values():
            if far.runs:
                far.replica._tell_all()
        await settle()

    async def pass_time(self, seconds: float) -> None:
        """Time passes, with heartbeats, polls and ticks as they come in a service."""
        for _ in range(round(seconds / INTERVAL_S)):
            self.clock.now += INTERVAL_S
            await self.beat()
            await self.poll()
            self.dispatcher.tick(INTERVAL_S)
            await settle()

    async def run_out(self) -> None:
        """Iterate until every client has its end."""
        for _ in range(500):
            if all(client.task.done() for client in self.clients):
                return
            await self.step()
            await self.beat()
        raise AssertionError("some clients wait for ever")

    async def close(self) -> None:
        self.dispatcher.close()
        for client in self.clients:
            client.task.cancel()
            with suppress(asyncio.CancelledError):
                await client.task
        self.replicas.close()
        await settle()

    def assert_idle(self) -> None:
        """The books are at zero on both sides."""
        assert self.book.in_flight == 0
        assert self.dispatcher.waiting_requests == self.dispatcher.waiting_slots == 0
        for link in self.dispatcher._links:
            assert not link.entries
        for far in self.replicas.all.values():
            if not far.is_dead:
                assert not far.engine.running


def replicas_of(*names: str, **given: Any) -> FarReplicas:
    replicas = FarReplicas()
    replicas.add(*(FarReplica(name, **given) for name in names))
    return replicas
