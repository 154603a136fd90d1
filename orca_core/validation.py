"""From what a caller wants to a ``GenerationRequest`` that cannot be wrong: the one door into an engine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from orca_core.errors import InvalidRequestError, RequestTooLargeError
from orca_core.params import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from orca_core.types import GenerationRequest, ModelInfo


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
    if not token_ids:
        raise InvalidRequestError("prompt", "must have at least one token")
    if len(token_ids) >= info.max_model_len:  # before looking at each of what may be millions
        raise RequestTooLargeError(len(token_ids), sampling.max_new_tokens or 1, info.max_model_len, "max_model_len")
    _check_ids("prompt", token_ids, info.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", tuple(sampling.logit_bias), info.vocab_size)
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidRequestError("timeout_s", "must be a positive number of seconds")
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


def _check_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Every id is an int in ``[0, vocab_size)``."""
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(field, f"token ids must be integers from 0 to {vocab_size - 1}")
