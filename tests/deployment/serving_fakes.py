"""Replicas and a tokenizer without a model or an engine, for the ingress. ``far_replicas``: those with more life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from deployment.parcels import Accepted, LineDepth, Parcel, Rejected, ReplicaReport, Standing, pack
from orca_core.types import CancelOutcome, FinishReason, GenerationChunk, GenerationRequest, Load, Timings, Usage
from tests.deployment.stepping import INFO

__all__ = ["INFO", "ByteTokenizer", "FakeReplicas", "chunks_of"]

TURNS = 8
"""Turns of the event loop between two chunks: enough for a reader to have taken the first."""


def chunks_of(request: GenerationRequest) -> list[GenerationChunk]:
    """One chunk a token; the last one with all it must have."""
    n = request.max_new_tokens
    chunks = [GenerationChunk(request.request_id, f"t{i} ", (i,)) for i in range(n - 1)]
    usage = Usage(len(request.token_ids), n)
    last = GenerationChunk(
        request.request_id, f"t{n - 1} ", (n - 1,), (), FinishReason.LENGTH, None, usage, Timings(0.1, 0.2, 0.3)
    )
    return [*chunks, last]


class FakeStream:
    """One request on ``FakeReplicas``: plays chunks, waits after ``n_free`` of them."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.ended = asyncio.Event()
        self.n_cancels = 0

    def cancel(self) -> None:
        self.n_cancels += 1
        self.ended.set()


class FakeParcels:
    """The stream of the one replica; ends with an error, if it is told to."""

    def __init__(self, replicas: FakeReplicas) -> None:
        self.replicas = replicas
        self.items: asyncio.Queue[Parcel | Exception | None] = asyncio.Queue()
        self.items.put_nowait(Parcel(replicas.standing()))
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aiter__(self) -> AsyncIterator[Parcel]:
        while (item := await self.items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def play(self, stream: FakeStream) -> None:
        task = asyncio.get_running_loop().create_task(self._play(stream))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _play(self, stream: FakeStream) -> None:
        replicas = self.replicas
        for number, chunk in enumerate(chunks_of(stream.request)[: replicas.cut_after]):
            if number >= replicas.n_free:
                await stream.ended.wait()
            if stream.n_cancels:
                return
            self.items.put_nowait(Parcel(replicas.standing(), (pack(chunk),)))
            for _ in range(TURNS):
                await asyncio.sleep(0)
        if replicas.cut_after is not None:
            self.items.put_nowait(replicas.error)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.items.put_nowait(None)


class FakeReplicas:
    """``ReplicaSet`` of as many replicas as there are ``infos``; only the first is ever sent anything."""

    def __init__(self) -> None:
        self.infos = [INFO]
        self.n_free = 10**9
        self.cut_after: int | None = None
        self.error: Exception | None = None
        self.submit_error: Exception | None = None
        self.streams: list[FakeStream] = []
        self.links: dict[str, FakeParcels] = {}
        self.begun = asyncio.Event()
        self.outcome = CancelOutcome.NOT_FOUND
        self.cancels: list[str] = []
        self.handles: list[str] = []
        self.n_reports = 0
        self.n_firsts = 0
        self.dropped: list[str] = []
        self.paces: list[float] = []
        self.at = 0.0

    def standing(self) -> Standing:
        self.at += 1.0
        return Standing(Load(n_slots=INFO.n_slots), self.at, len(self.streams))

    def attach(self, replica: str, ingress_id: str, link_id: str) -> FakeParcels:
        self.links[link_id] = FakeParcels(self)
        if replica != "replica-1":
            self.links[link_id].items.get_nowait()  # it never says how it stands
        return self.links[link_id]

    async def submit(
        self, replica: str, link_id: str, request: GenerationRequest, client_request_id: str
    ) -> Accepted | Rejected:
        if self.submit_error is not None:
            raise self.submit_error
        self.streams.append(FakeStream(request))
        self.handles.append(client_request_id)
        self.links[link_id].play(self.streams[-1])
        self.begun.set()
        return Accepted(len(self.streams))

    def drop(self, replica: str, link_id: str, request_ids: tuple[str, ...]) -> None:
        self.dropped += request_ids
        for stream in self.streams:
            if stream.request.request_id in request_ids:
                stream.cancel()

    def pace(self, replica: str, link_id: str, interval_s: float) -> None:
        self.paces.append(interval_s)

    async def reports(self, ingress_id: str, line: LineDepth) -> list[ReplicaReport]:
        self.n_reports += 1
        return [
            ReplicaReport(f"replica-{number}", info, Load(n_slots=info.n_slots), 0.0)
            for number, info in enumerate(self.infos, start=1)
        ]

    async def first(self) -> None:
        self.n_firsts += 1

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        self.cancels.append(client_request_id)
        return self.outcome


class ByteTokenizer:
    """A token a byte."""

    def __init__(self) -> None:
        self.n_calls = 0

    def encode(self, text: str) -> list[int]:
        self.n_calls += 1
        return list(text.encode())

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        return self.encode("".join(f"<{role}>{content}" for role, content in messages))
