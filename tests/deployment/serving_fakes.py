"""An engine, replicas and a tokenizer without a model, for the classes that Serve runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from deployment.replica import ReplicaReport
from orca_core.errors import OrcaError, RequestCancelledError
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


def chunks_of(request: GenerationRequest) -> list[GenerationChunk]:
    """One chunk a token; the last one with all it must have."""
    n = request.max_new_tokens
    chunks = [GenerationChunk(request.request_id, f"t{i} ", (i,)) for i in range(n - 1)]
    usage = Usage(len(request.token_ids), n)
    last = GenerationChunk(
        request.request_id, f"t{n - 1} ", (n - 1,), (), FinishReason.LENGTH, None, usage, Timings(0.1, 0.2, 0.3)
    )
    return [*chunks, last]


class FakeChannel:
    """Plays chunks; after ``n_free`` of them it waits until the request is cancelled."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.engine = engine
        self.request = request
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        for number, chunk in enumerate(chunks_of(self.request)):
            if self.engine.error is not None:
                raise self.engine.error
            if number >= self.engine.n_free:
                await self.cancelled.wait()
            if self.cancelled.is_set():
                raise RequestCancelledError(self.request.request_id)
            yield chunk

    def close(self) -> None:
        self.engine.live.pop(self.request.request_id, None)
        self.engine.closed.append(self.request.request_id)


class FakeEngine:
    def __init__(self, n_free: int = 10**9) -> None:
        self.n_free = n_free
        self.error: OrcaError | None = None
        self.live: dict[str, FakeChannel] = {}
        self.closed: list[str] = []
        self.well = Health(True)
        self.started = False
        self.ended = False

    def start(self) -> None:
        self.started = True

    def info(self) -> ModelInfo:
        return INFO

    def submit(self, request: GenerationRequest) -> FakeChannel:
        channel = self.live[request.request_id] = FakeChannel(self, request)
        return channel

    def cancel(self, request_id: str) -> CancelOutcome:
        if request_id not in self.live:
            return CancelOutcome.ALREADY_FINISHED if request_id in self.closed else CancelOutcome.NOT_FOUND
        self.live[request_id].cancelled.set()
        return CancelOutcome.CANCELLED

    def load(self) -> Load:
        reserved = sum(channel.request.total_tokens for channel in self.live.values())
        return Load(n_slots=INFO.n_slots, reserved_slots=reserved, running=len(self.live))

    def health(self) -> Health:
        return self.well

    def close(self, drain_timeout_s: float = 0.0) -> None:
        self.ended = True


class FakeStream:
    """One request on ``FakeReplicas``: plays chunks, waits after ``n_free`` of them, ends with an error if told to."""

    def __init__(self, replicas: FakeReplicas, request: GenerationRequest) -> None:
        self.replicas = replicas
        self.request = request
        self.ended = asyncio.Event()
        self.n_cancels = 0

    async def __aiter__(self) -> AsyncIterator[tuple[str, GenerationChunk]]:
        for number, chunk in enumerate(chunks_of(self.request)[: self.replicas.cut_after]):
            if number >= self.replicas.n_free:
                await self.ended.wait()
            if self.n_cancels:
                raise asyncio.CancelledError  # what Serve raises depends on where the request was
            yield "replica-1", chunk
        if self.replicas.error is not None:
            raise self.replicas.error

    def cancel(self) -> None:
        self.n_cancels += 1
        self.ended.set()


class FakeReplicas:
    def __init__(self) -> None:
        self.infos: list[ModelInfo] = [INFO]
        self.n_free = 10**9
        self.cut_after: int | None = None
        self.error: Exception | None = None
        self.streams: list[FakeStream] = []
        self.begun = asyncio.Event()
        self.outcome = CancelOutcome.NOT_FOUND
        self.cancels: list[str] = []
        self.n_reports = 0
        self.abandoned: list[str] = []

    def stream(self, request: GenerationRequest, client_request_id: str) -> FakeStream:
        self.streams.append(FakeStream(self, request))
        self.begun.set()
        return self.streams[-1]

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)

    async def reports(self) -> list[ReplicaReport]:
        self.n_reports += 1
        return [
            ReplicaReport(f"replica-{number}", info, Load(n_slots=info.n_slots), 0.0)
            for number, info in enumerate(self.infos, start=1)
        ]

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
