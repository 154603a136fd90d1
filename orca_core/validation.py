"""From what a caller wants to a ``GenerationRequest`` that cannot be wrong: the one door into an engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from orca_core.errors import InvalidRequestError, RequestTooLargeError
from orca_core.params import DEFAULT_MAX_NEW_TOKENS, Range, SamplingParams, is_number
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
    _check_prompt(token_ids, sampling, info)
    _check_sampling(sampling, info)
    if timeout_s is not None and not (is_number(timeout_s) and TIMEOUT_RANGE_S.contains(timeout_s)):
        raise InvalidRequestError("timeout_s", f"must be a number of seconds in {TIMEOUT_RANGE_S}")
    n_prompt = len(token_ids)
    room = min(info.max_model_len, info.n_slots) - n_prompt
    wanted = sampling.max_new_tokens
    if wanted is None:
        wanted = max(1, min(max(DEFAULT_MAX_NEW_TOKENS, sampling.min_new_tokens), room))
    if wanted > info.max_model_len - n_prompt:
        raise RequestTooLargeError(n_prompt, wanted, info.max_model_len, "max_model_len")
    if wanted > info.n_slots - n_prompt:
        raise RequestTooLargeError(n_prompt, wanted, info.n_slots, "n_slots")
    if sampling.min_new_tokens > wanted:
        raise InvalidRequestError("min_new_tokens", f"must not be above max_new_tokens, here {wanted}")
    if len(emitted_ids) >= wanted:
        raise InvalidRequestError("emitted_ids", f"must be fewer than max_new_tokens, here {wanted}")
    _check_ids("emitted_ids", emitted_ids, info.vocab_size)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return GenerationRequest(request_id, tuple(token_ids), wanted, seed, sampling, timeout_s, tuple(emitted_ids))


def _check_prompt(token_ids: object, sampling: SamplingParams, info: ModelInfo) -> None:
    if isinstance(token_ids, str | bytes | bytearray) or not isinstance(token_ids, Sequence):
        raise InvalidRequestError("prompt", "must be a list of token ids (of an array: its tolist())")
    if not token_ids:
        raise InvalidRequestError("prompt", "must have at least one token")
    if len(token_ids) >= info.max_model_len:  # before looking at each of what may be millions
        raise RequestTooLargeError(len(token_ids), sampling.max_new_tokens or 1, info.max_model_len, "max_model_len")
    _check_ids("prompt", token_ids, info.vocab_size)


def _check_sampling(sampling: SamplingParams, info: ModelInfo) -> None:
    """What cannot be known without the model: which ids there are."""
    _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", tuple(sampling.logit_bias), info.vocab_size)
    if sampling.min_new_tokens and len({*sampling.stop_token_ids, *info.eos_ids}) >= info.vocab_size:
        raise InvalidRequestError("stop_token_ids", "leave no token to choose before min_new_tokens")


def _check_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Every id is an int in ``[0, vocab_size)``."""
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(field, f"token ids must be integers from 0 to {vocab_size - 1}{_hint(token_id)}")


def _hint(token_id: object) -> str:
    """For a list of NumPy's or torch's scalars, which print like integers and are none."""
    return "" if isinstance(token_id, int | float | str | None) else f", not {type(token_id).__name__}"
