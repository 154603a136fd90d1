"""Sampling parameters and the one table of their legal ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from orca_core.errors import InvalidRequestError

DEFAULT_MAX_NEW_TOKENS: Final = 256
"""Output cap of a request that names none; lowered where prompt + cap would not fit the model."""

MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Closed, bounded interval of a numeric field; ``low_open`` excludes the lower end."""

    low: float
    high: float
    low_open: bool = False

    def contains(self, value: float) -> bool:
        """False for NaN, infinities and whatever lies outside. Integers are compared exactly, however large."""
        return (value > self.low if self.low_open else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        low, high = (str(int(end)) if end == int(end) else f"{end:g}" for end in (self.low, self.high))
        return f"{'(' if self.low_open else '['}{low}, {high}]"


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
_OPTIONAL_FIELDS: Final = frozenset({"max_new_tokens", "seed", "logprobs"})
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
    - ``stop``: strings that end generation; not part of the text unless ``include_stop_text``. One string is one stop
      string. Of ``stop``, ``stop_token_ids`` and ``logit_bias``, ``None`` is none, and a copy is kept.
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
    stop: tuple[str, ...] = field(default=(), repr=False)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether the choice of a token depends on the tokens before it other than through the model."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalised or self.min_new_tokens > 0

    def __post_init__(self) -> None:
        for name, legal in SAMPLING_RANGES.items():
            _check_number(name, getattr(self, name), legal)
        for name in ("ignore_eos", "include_stop_text"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, "must be true or false")
        stop: object = self.stop
        keep = object.__setattr__  # frozen for everybody else
        keep(self, "stop", (stop,) if isinstance(stop, str) else _as_tuple("stop", stop))
        keep(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        keep(self, "logit_bias", _as_dict("logit_bias", self.logit_bias))
        _check_stops(self.stop)
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            if not is_number(bias) or not LOGIT_BIAS_RANGE.contains(bias):
                raise InvalidRequestError("logit_bias", f"values must be numbers in {LOGIT_BIAS_RANGE}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError("min_new_tokens", "must not be above max_new_tokens")


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequestError(name, "must be a list")
    return tuple(value)


def _as_dict(name: str, value: object) -> dict[object, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(name, "must map token ids to numbers")
    return dict(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an integer or a float; a truth value is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_number(name: str, value: object, legal: Range) -> None:
    if value is None and name in _OPTIONAL_FIELDS:
        return
    wanted = "an integer" if name in _INTEGER_FIELDS else "a number"
    if not is_number(value) or (name in _INTEGER_FIELDS and not isinstance(value, int)):
        raise InvalidRequestError(name, f"must be {wanted}")
    if not legal.contains(value):
        raise InvalidRequestError(name, f"must be {wanted} in {legal}")


def _check_stops(stops: Iterable[object]) -> None:
    texts = list(stops)
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop", "stop strings must be non-empty strings")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError("stop", f"a stop string has at most {MAX_STOP_BYTES} bytes")


def _check_ids(name: str, ids: Iterable[object]) -> None:
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidRequestError(name, "token ids must be integers of at least 0")
