"""What a reader is told of one new token."""

from __future__ import annotations

from orca_core.request import Request
from orca_core.sampling import SampledToken
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, GenerationChunk, PositionLogprobs, Timings, TokenLogprob, Usage


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
    return GenerationChunk(
        request.request_id,
        text,
        (token.token_id,),
        _position_logprobs(token, tokenizer),
        finish,
        stop,
        _usage(request) if finish else None,
        _timings(request, now) if finish else None,
    )


def _position_logprobs(token: SampledToken, tokenizer: Tokenizer) -> tuple[PositionLogprobs, ...]:
    """The token's log-probabilities with their spelling; empty where none were asked for."""
    if token.logprobs is None:
        return ()
    entries = [
        TokenLogprob(token_id, logprob, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id))
        for token_id, logprob in (token.logprobs.chosen, *token.logprobs.top)
    ]
    return (PositionLogprobs(entries[0], tuple(entries[1:])),)


def _usage(request: Request) -> Usage:
    return Usage(request.n_prompt_tokens, request.n_output_tokens, request.n_cached_prompt_tokens)


def _timings(request: Request, now: float) -> Timings:
    admitted = request.arrived_at if request.admitted_at is None else request.admitted_at
    first = now if request.first_token_at is None else request.first_token_at
    return Timings(admitted - request.arrived_at, first - request.arrived_at, now - request.arrived_at)
