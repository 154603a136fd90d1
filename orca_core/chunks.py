"""What a reader is told of one new token."""

from __future__ import annotations

from typing import Final

from orca_core.request import Request
from orca_core.sampling import RawLogprobs, SampledToken
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, GenerationChunk, PositionLogprobs, Timings, TokenLogprob, Usage

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each token


def chunk_of(
    request: Request,
    token: SampledToken,
    text: str,
    finish: FinishReason | None,
    stop: str | None,
    tokenizer: Tokenizer,
    now: float,
) -> GenerationChunk:
    """The chunk of a token that was appended at ``now``; the last one (``finish``) carries usage and timings."""
    token_id, _, asked = token
    logprobs = () if asked is None else _position_logprobs(asked, tokenizer)
    usage, timings = (None, None) if finish is None else (_usage(request), _timings(request, now))
    return _new(GenerationChunk, (request.request_id, text, (token_id,), logprobs, finish, stop, usage, timings))


def _position_logprobs(asked: RawLogprobs, tokenizer: Tokenizer) -> tuple[PositionLogprobs, ...]:
    """A token's log-probabilities with their spelling."""
    entries = [
        TokenLogprob(token_id, logprob, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id))
        for token_id, logprob in (asked.chosen, *asked.top)
    ]
    return (PositionLogprobs(entries[0], tuple(entries[1:])),)


def _usage(request: Request) -> Usage:
    return Usage(request.n_prompt_tokens, request.n_output_tokens, request.n_cached_prompt_tokens)


def _timings(request: Request, now: float) -> Timings:
    admitted = request.arrived_at if request.admitted_at is None else request.admitted_at
    first = now if request.first_token_at is None else request.first_token_at
    return Timings(admitted - request.arrived_at, first - request.arrived_at, now - request.arrived_at)
