"""A first iteration before traffic: pays one-time costs, and on a GPU measures the peak of the worst legal shape."""

from __future__ import annotations

import torch

from orca_core.attention import AttentionBackend
from orca_core.batch import Batch, Span
from orca_core.executor import ModelExecutor
from orca_core.kv import KVPool
from orca_core.models import Decoder
from orca_core.request import Request
from orca_core.types import GenerationRequest, SamplingParams

_COSTLY = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1, presence_penalty=0.1, logprobs=20, max_new_tokens=1
)
"""The sampling parameters that need the most memory: sorting, penalties and log-probabilities at once."""


def warm_up(
    decoder: Decoder,
    attention: AttentionBackend,
    *,
    n_requests: int,
    n_tokens: int,
    context: int,
    block_size: int,
) -> None:
    """Run one iteration of ``n_requests`` that all sample, ``n_tokens`` rows in all, each over ``context`` tokens.

    It has a pool of one block: all block tables point at it again and again, so that the shapes are those of full
    memory while the memory itself is not there yet.
    """
    pool = KVPool(decoder.kv_shape, 1, block_size, decoder.device)
    executor = ModelExecutor(decoder, pool, attention)
    executor.run_iteration(worst_batch(n_requests, n_tokens, context, block_size, decoder.device))


def worst_batch(n_requests: int, n_tokens: int, context: int, block_size: int, device: torch.device) -> Batch:
    """One request initiates with all rows that the others' increments leave; every one is ``context`` tokens long."""
    n_first = max(1, min(n_tokens - (n_requests - 1), context))
    blocks = (0,) * -(-context // block_size)
    spans: list[Span] = []
    start = 0
    for index in range(n_requests):
        n_rows = n_first if index == 0 else 1
        spec = GenerationRequest(f"warm-up-{index}", (0,) * context, 1, 0, _COSTLY)
        spans.append(Span(Request(spec, 0.0), start, n_rows, context, blocks, True))
        start += n_rows
    positions = [p for span in spans for p in range(span.context - span.n_tokens, span.context)]
    return Batch(
        tuple(spans),
        torch.zeros(start, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.zeros(start, dtype=torch.int64, device=device),
        torch.tensor([span.end - 1 for span in spans], dtype=torch.int64, device=device),
    )


def peak_activation_cuda(
    decoder: Decoder,
    attention: AttentionBackend,
    *,
    n_requests: int,
    n_tokens: int,
    context: int,
    block_size: int,
) -> int:
    """Bytes of GPU memory an iteration of that shape needs beside weights and K/V."""
    device = decoder.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    warm_up(decoder, attention, n_requests=n_requests, n_tokens=n_tokens, context=context, block_size=block_size)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
