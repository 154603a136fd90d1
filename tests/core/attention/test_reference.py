"""The reference backend against attention written out as loops over rows and heads."""

from __future__ import annotations

import math

import pytest
import torch

from orca_core.attention.base import AttentionSpec
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Scheduled, build_batch
from orca_core.kv import KVManager, KVPool, KVShape
from orca_core.request import Request
from orca_core.types import GenerationRequest

CPU = torch.device("cpu")
HEAD_DIM = 8


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """``q`` ``[n, n_heads, d]`` at positions ``first`` and on; ``k``, ``v`` ``[context, n_kv_heads, d]``."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        visible = first + row + 1
        for head in range(q.shape[1]):
            scores = [float(q[row, head] @ k[i, head // group]) * scale for i in range(visible)]
            weights = [math.exp(score - max(scores)) for score in scores]
            mean = sum(w * v[i, head // group] for i, w in enumerate(weights))
            out[row, head] = mean / sum(weights)
    return out


def running(request_id: str, length: int, kv: KVManager) -> Request:
    request = Request(GenerationRequest(request_id, tuple(range(length)), 1, seed=0), arrived_at=0.0)
    assert kv.reserve(request_id, request.total_tokens)
    request.admit(0.0)
    return request


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("schedule", [
    [(7, 0, 0)],
    [(3, 0, 0), (4, 0, 0)],
    [(3, 5, 1), (1, 1, 1), (4, 1, 9), (1, 2, 1)],
])  # fmt: skip
def test_equals_the_formula(n_heads: int, n_kv_heads: int, block_size: int, schedule: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = KVManager(64, block_size, 4)
    shape = KVShape(2, n_kv_heads, HEAD_DIM, torch.float32)
    pool = KVPool(shape, kv.n_blocks, block_size, CPU)
    for layer in range(2):  # whatever another request left behind must not be read
        pool.keys[layer].fill_(math.nan)
        pool.values[layer].fill_(math.nan)
    lengths = [sum(pieces) for pieces in zip(*schedule, strict=True)]
    requests = {i: running(str(i), length, kv) for i, length in enumerate(lengths) if length}
    known = {
        (layer, i, kind): torch.randn(lengths[i], n_kv_heads, HEAD_DIM, generator=generator)
        for layer in range(2) for i in requests for kind in "kv"
    }  # fmt: skip
    attention = ReferenceAttention()
    for pieces in schedule:
        chosen = [(i, n) for i, n in enumerate(pieces) if n]
        batch = build_batch([Scheduled(requests[i], n) for i, n in chosen], kv, CPU)
        attention.prepare(batch)
        for layer in range(2):
            q = torch.randn(batch.n_tokens, n_heads, HEAD_DIM, generator=generator)
            first = {i: requests[i].n_computed for i, _ in chosen}
            rows = {
                kind: torch.cat([known[layer, i, kind][first[i] : first[i] + n] for i, n in chosen]) for kind in "kv"
            }
            pool.write(layer, batch.slots, rows["k"], rows["v"])
            ours = attention.attend(layer, q, pool, batch, AttentionSpec(0.3))
            assert ours.shape == q.shape
            for (i, _), span in zip(chosen, batch.spans, strict=True):
                k, v = known[layer, i, "k"], known[layer, i, "v"]
                expected = written_out(q[span.start : span.end], k, v, first[i], 0.3)
                torch.testing.assert_close(ours[span.start : span.end], expected, atol=1e-5, rtol=1e-5)
        for i, n in chosen:
            requests[i].advance(n)
