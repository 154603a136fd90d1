"""An engine without a model that computes one token of every running request when told.

Tokens depend on all tokens before them: a stream that goes on elsewhere and lost or repeated one would say other things
from there on.
"""

from __future__ import annotations

from dataclasses import dataclass

from orca_core.channel import Channel, Outbox
from orca_core.errors import EngineDeadError, OrcaError, OverloadedError, RequestCancelledError
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
