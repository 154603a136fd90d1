"""A first iteration before traffic: pays one-time costs, and on a GPU measures the peak of the worst legal shape."""

from __future__ import annotations

import torch

from orca_core.attention import AttentionBackend
from orca_core.batch import Batch, Span
from orca_core.executor import ModelExecutor
from orca_core.kv import KVPool
from orca_core.models import AnyDecoder
from orca_core.request import Request
from orca_core.types import GenerationRequest, SamplingParams

_COSTLY = SamplingParams(
    temperature=100.0, top_p=0.99, min_p=1e-6, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logprobs=20, max_new_tokens=1,
)  # fmt: skip
"""The sampling parameters that need the most memory: penalties, log-probabilities, and a distribution so flat that its
filters have to look at every token in order."""


def warm_up(
    decoder: AnyDecoder,
    attention: AttentionBackend,
    *,
    n_requests: int,
    n_tokens: int,
    context: int,
    block_size: int,
) -> bool:
    """Run one iteration of ``n_requests`` that all sample, ``n_tokens`` rows in all, each over ``context`` tokens.

    Returns whether all of them found something sound to choose from; with NaN among the weights none would.

    It has a pool of one block: all block tables point at it again and again, so that the shapes are those of full
    memory while the memory itself is not there yet.
    """
    pool = KVPool(decoder.kv_shape, 1, block_size, decoder.device)
    executor = ModelExecutor(decoder, pool, attention)
    shape = (n_requests, n_tokens, context, block_size)
    sampled = executor.run_iteration(worst_batch(*shape, decoder.device, decoder.config.vocab_size))
    return all(token.ok for token in sampled)


def worst_batch(
    n_requests: int, n_tokens: int, context: int, block_size: int, device: torch.device, vocab_size: int = 1
) -> Batch:
    """All ``n_tokens`` rows, as many of them in as few requests as there may be; every one is ``context`` tokens long.

    The first request initiates with all rows that the others' increments leave or, where that is more than a context,
    with a whole one, and so on. Its tokens are as different as they can be, which is what penalties depend on.
    """
    blocks = (0,) * -(-context // block_size)
    ids = tuple(i % vocab_size for i in range(context))
    spans: list[Span] = []
    start = 0
    for index in range(n_requests):
        n_rows = max(1, min(n_tokens - start - (n_requests - index - 1), context))
        request = Request(GenerationRequest(f"warm-up-{index}", ids, 1, 0, _COSTLY), 0.0)
        spans.append(Span(request, start, n_rows, context, blocks, True))
        start += n_rows
    positions = [p for span in spans for p in range(span.context - span.n_tokens, span.context)]
    return Batch(
        tuple(spans),
        torch.zeros(start, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.zeros(start, dtype=torch.int64, device=device),
        torch.tensor([span.end - 1 for span in spans], dtype=torch.int64, device=device),
    )
