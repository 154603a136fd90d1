"""Plain values that travel between layers and processes. All are immutable, picklable and free of torch.

A ``repr`` ends up in logs: what holds any part of a prompt or an answer is left out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from orca_core.params import SAMPLING_RANGES, SamplingParams

__all__ = [
    "ROLES",
    "SAMPLING_RANGES",
    "CancelOutcome",
    "FinishReason",
    "GenerationChunk",
    "GenerationRequest",
    "GenerationResult",
    "Health",
    "Load",
    "ModelInfo",
    "PositionLogprobs",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "Usage",
    "merge_chunks",
]

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
"""Roles of a chat message, the same for every face -> what the chat template is told. Templates write a role as it is:
any other text could spell a control token."""


class FinishReason(Enum):
    """Why a request ended normally. Anything else is an error, never a finish reason."""

    STOP = "stop"
    """An eos id, a stop token id or a stop string."""
    LENGTH = "length"
    """``max_new_tokens`` were generated."""


class CancelOutcome(Enum):
    """Answer of ``Engine.cancel``."""

    CANCELLED = "cancelled"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request, ready for an engine.

    ``request_id`` is ours and unique; the client's own id stays at the edge. ``token_ids``: the prompt, never empty.
    ``max_new_tokens`` is resolved (``sampling.max_new_tokens`` may be ``None``). ``seed`` is resolved too.
    ``timeout_s``: seconds from submission until the request must have ended; ``None`` = no deadline.
    ``emitted_ids``: output tokens that were generated and told elsewhere, fewer than ``max_new_tokens`` and without an
    end in them. The engine goes on behind them: they count as output in everything (limits, penalties, positions,
    stop strings, usage), but chunks hold new tokens and new text only.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float | None = None
    emitted_ids: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        """The demand, in slots: prompt + ``max_new_tokens`` (Orca section 4.2, ``max_tokens``)."""
        return len(self.token_ids) + self.max_new_tokens

    def __repr__(self) -> str:
        return (
            f"GenerationRequest({self.request_id!r}, prompt={len(self.token_ids)} tokens, "
            f"max_new_tokens={self.max_new_tokens})"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, fp32) of one token; ``text`` is its own decoding, ``bytes`` its raw bytes."""

    token_id: int = field(repr=False)
    logprob: float
    text: str = field(default="", repr=False)
    bytes: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one output position and its most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. ``cached_prompt_tokens`` of the prompt were found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the engine received the request. ``tpot_s``: mean time per output token after the first."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    def tpot_s(self, completion_tokens: int) -> float:
        """Mean seconds per output token after the first; 0 where there is at most one."""
        return (self.total_s - self.ttft_s) / (completion_tokens - 1) if completion_tokens > 1 else 0.0


class GenerationChunk(NamedTuple):
    """What became known of one request since the last chunk. ``finish_reason`` is set on the last one only.

    ``text`` and ``token_ids`` are deltas. ``stop``: the stop string or the token id (as text) that ended the request.
    A named tuple, since several are made for each token: a frozen dataclass takes many times as long.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    def __repr__(self) -> str:
        return (
            f"GenerationChunk(request_id={self.request_id!r}, finish_reason={self.finish_reason}, "
            f"usage={self.usage}, timings={self.timings})"
        )


def merge_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Consecutive chunks of one request as one chunk: how tokens are coalesced for a slow reader."""
    if len(chunks) == 1:
        return chunks[0]
    return chunks[-1]._replace(
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple([token_id for chunk in chunks for token_id in chunk.token_ids]),
        logprobs=tuple([entry for chunk in chunks for entry in chunk.logprobs]),
    )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The whole of one generation. ``metrics``: seconds, see ``Timings``."""

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    usage: Usage
    metrics: Timings
    stop: str | None = field(default=None, repr=False)
    logprobs: tuple[PositionLogprobs, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """A replica's snapshot; crosses processes as routing stats. Slots unless said otherwise.

    ``used_slots`` <= ``reserved_slots`` <= ``n_slots``. ``queued_slots``: total demand of waiting requests.
    ``iterations`` and the token totals count since start; ``prompt_tokens`` includes ``cached_prompt_tokens``, which
    were found in the prefix cache; a resumed request's prompt counts where it began. ``cached_slots``: free slots whose
    K and V a new request may find.
    """

    n_slots: int = 0
    reserved_slots: int = 0
    used_slots: int = 0
    queued_slots: int = 0
    waiting: int = 0
    running: int = 0
    iterations: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    cached_slots: int = 0

    @property
    def unused_slots(self) -> int:
        """Slots that are promised to requests and hold no token yet."""
        return self.reserved_slots - self.used_slots

    @property
    def headroom(self) -> int:
        """Slots that a new request could reserve at once; negative when the queue is longer than what is free."""
        return self.n_slots - self.reserved_slots - self.queued_slots


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress, and if not, why (a short sentence)."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers must know of a loaded model. ``max_model_len``: tokens; ``n_slots``: of one replica, measured."""

    model_id: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    n_slots: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
