"""From what a caller wants to a ``GenerationRequest`` that cannot be wrong: the one door into an engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from orca_core.errors import InvalidRequestError, RequestTooLargeError
from orca_core.params import DEFAULT_MAX_NEW_TOKENS, SAMPLING_RANGES, Range, SamplingParams, is_number
from orca_core.types import GenerationRequest, ModelInfo

TIMEOUT_RANGE_S: Final = Range(0, 1e9, low_open=True)


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    info: ModelInfo,
    timeout_s: float | None = None,
    emitted_ids: Sequence[int] = (),
) -> GenerationRequest:
    """Check a prompt against the model and the memory it will run in, and resolve what was left open.

    ``emitted_ids``: output of a generation that began elsewhere and goes on here (see ``GenerationRequest``).
    Raises ``InvalidRequestError`` (empty prompt, ids outside the vocabulary, bad timeout, as many tokens emitted as
    there may be) and ``RequestTooLargeError`` with both numbers where prompt + ``max_new_tokens`` could never fit.
    """
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError("sampling", "must be SamplingParams")
    _check_sequence("prompt", token_ids)
    _check_sequence("emitted_ids", emitted_ids)
    n_prompt = len(token_ids)
    wanted = sampling.max_new_tokens
    if wanted is None:
        room = min(info.max_model_len, info.n_slots) - n_prompt
        wanted = max(1, min(max(DEFAULT_MAX_NEW_TOKENS, sampling.min_new_tokens), room))
    _check_size(n_prompt, wanted, len(emitted_ids), info)  # before copying what may be millions
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    request = GenerationRequest(request_id, tuple(token_ids), wanted, seed, sampling, timeout_s, tuple(emitted_ids))
    check_request(request, info)
    return request


def check_request(request: GenerationRequest, info: ModelInfo) -> None:
    """Refuse a request that could only fail, or harm, inside an engine; whoever made it. Cheap: one pass over the ids.

    Raises ``InvalidRequestError`` and ``RequestTooLargeError`` as ``make_request`` does.
    """
    if not isinstance(request, GenerationRequest):
        raise InvalidRequestError("request", "must be a GenerationRequest")
    if not isinstance(request.request_id, str):
        raise InvalidRequestError("request_id", "must be a string")
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidRequestError("sampling", "must be SamplingParams")
    for field, ids in (("prompt", request.token_ids), ("emitted_ids", request.emitted_ids)):
        if not isinstance(ids, tuple):
            raise InvalidRequestError(field, "must be a tuple of token ids")
    _check_integer("max_new_tokens", request.max_new_tokens)
    _check_integer("seed", request.seed)
    timeout_s = request.timeout_s
    if timeout_s is not None and not (is_number(timeout_s) and TIMEOUT_RANGE_S.contains(timeout_s)):
        raise InvalidRequestError("timeout_s", f"must be a number of seconds in {TIMEOUT_RANGE_S}")
    _check_size(len(request.token_ids), request.max_new_tokens, len(request.emitted_ids), info)
    _check_ids("prompt", request.token_ids, info.vocab_size)
    _check_ids("emitted_ids", request.emitted_ids, info.vocab_size)
    _check_sampling(request, info)


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not SAMPLING_RANGES[name].contains(value):
        raise InvalidRequestError(name, f"must be an integer in {SAMPLING_RANGES[name]}")


def _check_sequence(field: str, ids: object) -> None:
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise InvalidRequestError(field, "must be a list of token ids (of an array: its tolist())")


def _check_size(n_prompt: int, max_new_tokens: int, n_emitted: int, info: ModelInfo) -> None:
    if not n_prompt:
        raise InvalidRequestError("prompt", "must have at least one token")
    for limit, name in ((info.max_model_len, "max_model_len"), (info.n_slots, "n_slots")):
        if n_prompt + max_new_tokens > limit:
            raise RequestTooLargeError(n_prompt, max_new_tokens, limit, name)
    if n_emitted >= max_new_tokens:
        raise InvalidRequestError("emitted_ids", f"must be fewer than max_new_tokens, here {max_new_tokens}")


def _check_sampling(request: GenerationRequest, info: ModelInfo) -> None:
    """What cannot be known without the model and the number of tokens."""
    sampling = request.sampling
    _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", tuple(sampling.logit_bias), info.vocab_size)
    if sampling.min_new_tokens > request.max_new_tokens:
        raise InvalidRequestError("min_new_tokens", f"must not be above max_new_tokens, here {request.max_new_tokens}")
    if sampling.min_new_tokens and len({*sampling.stop_token_ids, *info.eos_ids}) >= info.vocab_size:
        raise InvalidRequestError("stop_token_ids", "leave no token to choose before min_new_tokens")


def _check_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Every id is an int in ``[0, vocab_size)``. Without a Python step for each: an engine looks again."""
    if not ids:
        return
    are_ints = all(issubclass(kind, int) and kind is not bool for kind in set(map(type, ids)))
    if not are_ints or min(ids) < 0 or max(ids) >= vocab_size:  # type: ignore[type-var, operator]
        raise InvalidRequestError(field, f"token ids must be integers from 0 to {vocab_size - 1}{_hint(ids)}")


def _hint(ids: Sequence[object]) -> str:
    """For a list of NumPy's or torch's scalars, which print like integers and are none."""
    odd = next((each for each in ids if not isinstance(each, int | float | str | None)), None)
    return "" if odd is None else f", not {type(odd).__name__}"
