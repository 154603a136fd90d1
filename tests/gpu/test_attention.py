"""The real kernel against the reference backend and against itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from orca_core.attention.base import AttentionSpec
from orca_core.attention.cuda import VarlenAttention, why_not_varlen
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.kv import KVManager, KVPool, KVShape
from orca_core.request import Request
from orca_core.types import GenerationRequest

pytestmark = pytest.mark.gpu

BLOCK = 256
PIECES = [(256, 300, 1), (263, 1, 1), (1, 1, 1), (1, 40, 1)]
TOTALS = [sum(pieces) for pieces in zip(*PIECES, strict=True)]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def make(n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[KVManager, KVPool]:
    kv = KVManager(sum(TOTALS), BLOCK, len(TOTALS))
    pool = KVPool(KVShape(1, n_kv_heads, head_dim, dtype), kv.n_blocks, BLOCK, device)
    pool.keys[0].fill_(math.nan)
    pool.values[0].fill_(math.nan)
    return kv, pool


def requests_for(kv: KVManager) -> list[Request]:
    made = [Request(GenerationRequest(str(i), tuple(range(n)), 1, 0), 0.0) for i, n in enumerate(TOTALS)]
    for request, total in zip(made, TOTALS, strict=True):
        assert kv.reserve(request.request_id, total)
        request.admit(0.0)
    return made


def test_this_gpu_can() -> None:
    shape = KVShape(1, 2, 64, torch.bfloat16)
    has_flash = torch.backends.cuda.is_flash_attention_available()
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        pytest.skip("FlashAttention needs compute capability 8.0")
    assert why_not_varlen(shape, [AttentionSpec(1.0)], capability, has_flash=has_flash) is None


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_the_reference(
    n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    kv, pool = make(n_kv_heads, head_dim, dtype, device)
    requests = requests_for(kv)
    varlen, reference = VarlenAttention(BLOCK, device), ReferenceAttention()
    spec = AttentionSpec(head_dim**-0.5)
    torch.manual_seed(0)
    for pieces in PIECES:
        batch = build_batch([Scheduled(r, n) for r, n in zip(requests, pieces, strict=True)], kv, device)
        k, v = (torch.randn(batch.n_tokens, n_kv_heads, head_dim, device=device, dtype=dtype) for _ in range(2))
        pool.write(0, batch.slots, k, v)
        # as the decoder's: a slice of the rows of q, k and v together
        q = torch.randn(batch.n_tokens, n_heads + 2 * n_kv_heads, head_dim, device=device, dtype=dtype)[:, :n_heads]
        varlen.prepare(batch)
        reference.prepare(batch)
        ours, theirs = varlen.attend(0, q, pool, batch, spec), reference.attend(0, q, pool, batch, spec)
        assert ours.shape == q.shape
        torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
        for request, n in zip(requests, pieces, strict=True):
            request.advance(n)


@pytest.mark.parametrize("window", [1, 7, 256, 300])
def test_a_window(window: int, device: torch.device) -> None:
    kv, pool = make(2, 64, torch.bfloat16, device)
    requests = requests_for(kv)
    varlen = VarlenAttention(BLOCK, device)
    torch.manual_seed(1)
    for pieces in PIECES:
        batch = build_batch([Scheduled(r, n) for r, n in zip(requests, pieces, strict=True)], kv, device)
        k, v = (torch.randn(batch.n_tokens, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
        pool.write(0, batch.slots, k, v)
        q = torch.randn(batch.n_tokens, 2, 64, device=device, dtype=torch.bfloat16)
        varlen.prepare(batch)
        ours = varlen.attend(0, q, pool, batch, AttentionSpec(0.125, window=window))
        torch.testing.assert_close(ours.float(), windowed(q, pool, batch, window), atol=2e-2, rtol=2e-2)
        for request, n in zip(requests, pieces, strict=True):
            request.advance(n)


def windowed(q: torch.Tensor, pool: KVPool, batch: Batch, window: int) -> torch.Tensor:
    """Written out, in float32, as many heads for keys as for queries."""
    out = torch.empty(q.shape, device=q.device)
    for span in batch.spans:
        slots = [span.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(span.context)]
        keys, values = pool.flat_keys(0)[slots].float(), pool.flat_values(0)[slots].float()
        at = torch.arange(span.context - span.n_tokens, span.context, device=q.device)[:, None]
        seen = torch.arange(span.context, device=q.device)
        hidden = (seen > at) | (seen <= at - window)
        scores = torch.einsum("qhd,khd->hqk", q[span.start : span.end].float(), keys) * 0.125
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[span.start : span.end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def test_a_row_is_the_same_alone_and_in_a_batch(device: torch.device) -> None:
    """Bit for bit, which is what ``num_splits=1`` is for. Of attention alone; matrix products make no such promise."""
    kv, pool = make(2, 64, torch.bfloat16, device)
    varlen = VarlenAttention(BLOCK, device)
    torch.manual_seed(2)
    batch = build_batch([Scheduled(r, n) for r, n in zip(requests_for(kv), TOTALS, strict=True)], kv, device)
    k, v = (torch.randn(batch.n_tokens, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    pool.write(0, batch.slots, k, v)
    q = torch.randn(batch.n_tokens, 4, 64, device=device, dtype=torch.bfloat16)
    varlen.prepare(batch)
    together = varlen.attend(0, q, pool, batch, AttentionSpec(0.125))
    for span in batch.spans[:2]:
        alone = replace(batch, spans=(span._replace(start=0),))
        varlen.prepare(alone)
        one = varlen.attend(0, q[span.start : span.end], pool, alone, AttentionSpec(0.125))
        assert torch.equal(one, together[span.start : span.end])
