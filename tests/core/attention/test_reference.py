"""The reference backend against attention written out as loops over rows and heads."""

from __future__ import annotations

import math

import pytest
import torch

from orca_core.attention import AttentionSpec
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Scheduled, build_batch
from orca_core.kv import KVManager, KVPool, KVShape
from orca_core.request import Request
from orca_core.types import GenerationRequest

CPU = torch.device("cpu")
HEAD_DIM = 8


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, spec: AttentionSpec) -> torch.Tensor:
    """``q`` ``[n, n_heads, d]`` at positions ``first`` and on; ``k``, ``v`` ``[context, n_kv_heads, d]``."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        position = first + row
        visible = [i for i in range(position + 1) if spec.window is None or position - i < spec.window]
        for head in range(q.shape[1]):
            scores = [float(q[row, head] @ k[i, head // group]) * spec.scale for i in visible]
            if spec.softcap is not None:
                scores = [spec.softcap * math.tanh(score / spec.softcap) for score in scores]
            weights = [math.exp(score - max(scores)) for score in scores]
            mean = sum(w * v[i, head // group] for i, w in zip(visible, weights, strict=True))
            out[row, head] = mean / sum(weights)
    return out


def running(request_id: str, length: int, kv: KVManager) -> Request:
    request = Request(GenerationRequest(request_id, tuple(range(length)), 1, seed=0), arrived_at=0.0)
    assert kv.reserve(request_id, request.total_tokens)
    request.admit(0.0)
    return request


SCHEDULES = [
    [(7, 0, 0)],
    [(3, 0, 0), (4, 0, 0)],
    [(3, 5, 1), (1, 1, 1), (4, 1, 9), (1, 2, 1)],
]


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_formula(n_heads: int, n_kv_heads: int, block_size: int, schedule: list[tuple[int, ...]]) -> None:
    check(n_heads, n_kv_heads, block_size, schedule, [AttentionSpec(0.3)])


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("specs", [
    [AttentionSpec(0.3, window=1)],
    [AttentionSpec(0.3, window=3)],
    [AttentionSpec(0.3, window=7)],  # as long as one of the prompts
    [AttentionSpec(0.3, window=5), AttentionSpec(0.7), AttentionSpec(0.3, window=2), AttentionSpec(0.3, window=5)],
    [AttentionSpec(0.3, softcap=0.8), AttentionSpec(0.3, window=4, softcap=1.5)],
])  # fmt: skip
def test_windows_and_softcaps(
    n_kv_heads: int, block_size: int, schedule: list[tuple[int, ...]], specs: list[AttentionSpec]
) -> None:
    """The layers of one iteration differ, and each sees its own window."""
    check(4, n_kv_heads, block_size, schedule, specs)


def test_a_softcap_bounds_what_one_score_can_do() -> None:
    """Without it the one large product would take all the weight."""
    kv = KVManager(8, 4, 1)
    pool = KVPool(KVShape(1, 1, HEAD_DIM, torch.float32), kv.n_blocks, 4, CPU)
    request = running("a", 2, kv)
    batch = build_batch([Scheduled(request, 2)], kv, CPU)
    k = torch.zeros(2, 1, HEAD_DIM)
    k[0] = 1000.0
    v = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1, HEAD_DIM)
    pool.write(0, batch.slots, k, v)
    attention = ReferenceAttention()
    attention.prepare(batch)
    out = attention.attend(0, torch.ones(2, 1, HEAD_DIM), pool, batch, AttentionSpec(1.0, softcap=1.0))
    torch.testing.assert_close(out[1], torch.full((1, HEAD_DIM), 1 / (1 + math.e)))


def check(
    n_heads: int, n_kv_heads: int, block_size: int, schedule: list[tuple[int, ...]], specs: list[AttentionSpec]
) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = KVManager(64, block_size, 4)
    n_layers = max(2, len(specs))
    shape = KVShape(n_layers, n_kv_heads, HEAD_DIM, torch.float32)
    pool = KVPool(shape, kv.n_blocks, block_size, CPU)
    for layer in range(n_layers):  # whatever another request left behind must not be read
        pool.keys[layer].fill_(math.nan)
        pool.values[layer].fill_(math.nan)
    lengths = [sum(pieces) for pieces in zip(*schedule, strict=True)]
    requests = {i: running(str(i), length, kv) for i, length in enumerate(lengths) if length}
    known = {
        (layer, i, kind): torch.randn(lengths[i], n_kv_heads, HEAD_DIM, generator=generator)
        for layer in range(n_layers) for i in requests for kind in "kv"
    }  # fmt: skip
    attention = ReferenceAttention()
    for pieces in schedule:
        chosen = [(i, n) for i, n in enumerate(pieces) if n]
        batch = build_batch([Scheduled(requests[i], n) for i, n in chosen], kv, CPU)
        attention.prepare(batch)
        for layer in range(n_layers):
            q = torch.randn(batch.n_tokens, n_heads, HEAD_DIM, generator=generator)
            first = {i: requests[i].n_computed for i, _ in chosen}
            rows = {
                kind: torch.cat([known[layer, i, kind][first[i] : first[i] + n] for i, n in chosen]) for kind in "kv"
            }
            pool.write(layer, batch.slots, rows["k"], rows["v"])
            spec = specs[layer % len(specs)]
            ours = attention.attend(layer, q, pool, batch, spec)
            assert ours.shape == q.shape
            for (i, _), span in zip(chosen, batch.spans, strict=True):
                k, v = known[layer, i, "k"], known[layer, i, "v"]
                expected = written_out(q[span.start : span.end], k, v, first[i], spec)
                torch.testing.assert_close(ours[span.start : span.end], expected, atol=1e-5, rtol=1e-5)
        for i, n in chosen:
            requests[i].advance(n)
