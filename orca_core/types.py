"""Plain values that travel between layers and processes. All are immutable, picklable and free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from orca_core.errors import InvalidRequestError

DEFAULT_MAX_NEW_TOKENS: Final = 256
"""Output cap of a request that names none; lowered where prompt + cap would not fit the model."""

MAX_SEED: Final = 2**64 - 1


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
class Range:
    """Closed interval of a numeric field; ``low_open`` excludes the lower end."""

    low: float
    high: float
    low_open: bool = False

    def contains(self, value: float) -> bool:
        """False for NaN, infinities and whatever lies outside."""
        if not math.isfinite(value):
            return False
        return (value > self.low if self.low_open else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}]"


SAMPLING_RANGES: Final[Mapping[str, Range]] = {
    "max_new_tokens": Range(1, 2**31 - 1),
    "min_new_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, low_open=True),
    "top_k": Range(0, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "seed": Range(0, MAX_SEED),
    "repetition_penalty": Range(0.0, 100.0, low_open=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "logprobs": Range(0, 20),
}
"""The one table of legal ranges; every face (Python, gRPC, HTTP) is checked against it by ``SamplingParams`` itself."""

_INTEGER_FIELDS: Final = frozenset({"max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs"})
LOGIT_BIAS_RANGE: Final = Range(-100.0, 100.0)
MAX_STOP_STRINGS: Final = 16
MAX_STOP_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one generation, and when to stop. Cannot be constructed wrong.

    - ``max_new_tokens``: most tokens to generate; ``None`` = ``DEFAULT_MAX_NEW_TOKENS``, or less where the rest of
      ``max_model_len`` is smaller.
    - ``min_new_tokens``: eos and stop token ids cannot be chosen before that many tokens.
    - ``temperature``: 0 = greedy (the most likely token; ties go to the lowest id).
    - ``top_k``: 0 = off. ``top_p``: 1 = off. ``min_p``: 0 = off; keeps tokens with p >= min_p * max p.
    - ``seed``: ``None`` = chosen at random per request. The same seed gives the same tokens whatever the batch.
    - ``stop``: strings that end generation; not part of the text unless ``include_stop_text``.
    - ``stop_token_ids``: like eos, for this request. ``ignore_eos``: eos ids don't end the request.
    - ``repetition_penalty`` (1 = off, over prompt and output), ``presence_penalty`` and ``frequency_penalty`` (0 =
      off, over output): as in the OpenAI and transformers definitions.
    - ``logit_bias``: token id -> value added to its logit.
    - ``logprobs``: ``None`` = none; n = the chosen token's log-probability and those of the n most likely tokens,
      from the fp32 log-softmax of the model's raw logits, before temperature, penalties and bias.

    Raises ``InvalidRequestError`` naming the field.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, legal in SAMPLING_RANGES.items():
            self._check_number(name, getattr(self, name), legal)
        self._check_stops()
        for token_id, bias in self.logit_bias.items():
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise InvalidRequestError("logit_bias", "token ids must be integers of at least 0")
            if not _is_number(bias) or not LOGIT_BIAS_RANGE.contains(bias):
                raise InvalidRequestError("logit_bias", f"values must be numbers in {LOGIT_BIAS_RANGE}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError("min_new_tokens", "must not be above max_new_tokens")

    def _check_number(self, name: str, value: object, legal: Range) -> None:
        if value is None and name in ("max_new_tokens", "seed", "logprobs"):
            return
        wanted = "an integer" if name in _INTEGER_FIELDS else "a number"
        if not _is_number(value) or (name in _INTEGER_FIELDS and not isinstance(value, int)):
            raise InvalidRequestError(name, f"must be {wanted}")
        assert isinstance(value, int | float)  # for mypy: _is_number said so
        inside = legal.low <= value <= legal.high if isinstance(value, int) else legal.contains(value)
        if not inside or (legal.low_open and value == legal.low):
            raise InvalidRequestError(name, f"must be {wanted} in {legal}")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError("stop", "stop strings must be non-empty strings")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise InvalidRequestError("stop", f"a stop string has at most {MAX_STOP_BYTES} bytes")
        for token_id in self.stop_token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise InvalidRequestError("stop_token_ids", "token ids must be integers of at least 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request, ready for an engine.

    ``request_id`` is ours and unique; the client's own id stays at the edge. ``token_ids``: the prompt, at least one id.
    ``max_new_tokens`` is resolved (``sampling.max_new_tokens`` may be ``None``). ``seed`` is resolved too.
    ``timeout_s``: seconds from submission until the request must have ended; ``None`` = no deadline.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float | None = None

    @property
    def total_tokens(self) -> int:
        """The demand, in slots: prompt + ``max_new_tokens`` (Orca section 4.2, ``max_tokens``)."""
        return len(self.token_ids) + self.max_new_tokens

    def __repr__(self) -> str:  # a repr ends up in logs: it must not hold the prompt
        return (
            f"GenerationRequest({self.request_id!r}, prompt={len(self.token_ids)} tokens, "
            f"max_new_tokens={self.max_new_tokens})"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, fp32) of one token; ``text`` is its own decoding, ``bytes`` its raw bytes."""

    token_id: int
    logprob: float
    text: str = ""
    bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one output position and its most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

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


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What became known of one request since the last chunk. ``finish_reason`` is set on the last one only.

    ``text`` and ``token_ids`` are deltas. ``stop``: the stop string or the token id (as text) that ended the request.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None


def merge_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Consecutive chunks of one request as one chunk: how tokens are coalesced for a slow reader."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return replace(
        last,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The whole of one generation. ``metrics``: seconds, see ``Timings``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: Timings
    stop: str | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A replica's snapshot; crosses processes as routing stats. Slots unless said otherwise.

    ``used_slots`` <= ``reserved_slots`` <= ``n_slots``. ``queued_slots``: total demand of waiting requests.
    ``iterations`` and the token totals count since start.
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
