"""The CUDA backend, with a stand-in for the kernel, against the reference backend; and the kernel's own rules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from orca_core.attention.base import AttentionSpec
from orca_core.attention.cuda import VarlenAttention, VarlenFunction, why_not_varlen
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.config import EngineConfig
from orca_core.errors import ConfigError
from orca_core.kv import KVManager, KVPool, KVShape
from orca_core.request import Request
from orca_core.types import GenerationRequest
from tests.core.attention.varlen_stand_in import VarlenStandIn

CPU = torch.device("cpu")
HEAD_DIM = 8
SCHEDULES = [
    [(7, 0, 0)],
    [(3, 0, 0), (4, 0, 0)],
    [(3, 5, 1), (1, 1, 1), (4, 1, 9), (1, 2, 1)],
    [(9, 6, 2), (1, 1, 1), (1, 1, 1)],
]


class World:
    """A pool filled at random, and the same one in float32 for the reference; nothing unwritten is a number."""

    def __init__(self, n_kv_heads: int, block_size: int, dtype: torch.dtype, totals: Sequence[int]) -> None:
        self.kv = KVManager(sum(totals), block_size, len(totals))
        shape = KVShape(2, n_kv_heads, HEAD_DIM, dtype)
        self.pool = KVPool(shape, self.kv.n_blocks, block_size, CPU)
        self.wide = KVPool(replace(shape, dtype=torch.float32), self.kv.n_blocks, block_size, CPU)
        for tensor in (*self.pool.keys, *self.pool.values, *self.wide.keys, *self.wide.values):
            tensor.fill_(math.nan)
        self.requests = [self._running(i, total) for i, total in enumerate(totals)]
        self.random = torch.Generator().manual_seed(0)

    def _running(self, index: int, total: int) -> Request:
        request = Request(GenerationRequest(str(index), tuple(range(max(total, 1))), 1, seed=0), arrived_at=0.0)
        if total:
            assert self.kv.reserve(request.request_id, total)
            request.admit(0.0)
        return request

    def batch(self, pieces: Sequence[int]) -> Batch:
        chosen = [Scheduled(self.requests[i], n) for i, n in enumerate(pieces) if n]
        return build_batch(chosen, self.kv, CPU)

    def write(self, layer: int, batch: Batch) -> None:
        size = (batch.n_tokens, self.pool.shape.n_kv_heads, HEAD_DIM)
        k, v = (torch.randn(size, generator=self.random).to(self.pool.shape.dtype) for _ in range(2))
        self.pool.write(layer, batch.slots, k, v)
        self.wide.write(layer, batch.slots, k.float(), v.float())

    def query(self, batch: Batch, n_heads: int) -> torch.Tensor:
        """As the decoder's: a slice of the rows of q, k and v together."""
        n_all = n_heads + 2 * self.pool.shape.n_kv_heads
        rows = torch.randn(batch.n_tokens, n_all, HEAD_DIM, generator=self.random).to(self.pool.shape.dtype)
        return rows[:, :n_heads]

    def advance(self, batch: Batch) -> None:
        for span in batch.spans:
            span.request.advance(span.n_tokens)


def windowed(q: torch.Tensor, world: World, layer: int, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
    """Attention with a window, written out."""
    assert spec.window is not None
    out = torch.empty(q.shape)
    group = q.shape[1] // world.pool.shape.n_kv_heads
    keys, values = world.wide.flat_keys(layer), world.wide.flat_values(layer)
    size = world.kv.block_size
    for span in batch.spans:
        slots = [span.blocks[p // size] * size + p % size for p in range(span.context)]
        for i in range(span.n_tokens):
            position = span.context - span.n_tokens + i
            seen = slots[max(0, position - spec.window + 1) : position + 1]
            for head in range(q.shape[1]):
                scores = keys[seen, head // group] @ q[span.start + i, head].float() * spec.scale
                out[span.start + i, head] = scores.softmax(0) @ values[seen, head // group]
    return out


def test_the_stand_in_has_the_signature_of_the_real_one() -> None:
    real = inspect.signature(varlen_attn)
    for mine in (inspect.signature(VarlenStandIn()), inspect.signature(VarlenFunction.__call__)):
        parameters = [p for p in mine.parameters.values() if p.name != "self"]
        assert [(p.name, p.kind, p.default) for p in parameters] == [
            (p.name, p.kind, p.default) for p in real.parameters.values()
        ]


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_reference(n_heads: int, n_kv_heads: int, block_size: int, schedule: list[tuple[int, ...]]) -> None:
    world = World(n_kv_heads, block_size, torch.float16, [sum(pieces) for pieces in zip(*schedule, strict=True)])
    varlen, reference = VarlenAttention(block_size, CPU, VarlenStandIn(block_size)), ReferenceAttention()
    spec = AttentionSpec(0.3)
    for pieces in schedule:
        batch = world.batch(pieces)
        varlen.prepare(batch)
        reference.prepare(batch)
        for layer in range(2):
            q = world.query(batch, n_heads)
            world.write(layer, batch)
            ours = varlen.attend(layer, q, world.pool, batch, spec)
            expected = reference.attend(layer, q.float(), world.wide, batch, spec)
            assert ours.shape == q.shape
            torch.testing.assert_close(ours.float(), expected, atol=2e-3, rtol=2e-3)
        world.advance(batch)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_counts_the_rows_own_position(window: int) -> None:
    world = World(2, 4, torch.float16, [9, 9, 12])
    varlen = VarlenAttention(4, CPU, VarlenStandIn(4))
    spec = AttentionSpec(0.3, window=window)
    for pieces in SCHEDULES[2]:
        batch = world.batch(pieces)
        varlen.prepare(batch)
        q = world.query(batch, 4)
        world.write(0, batch)
        ours = varlen.attend(0, q, world.pool, batch, spec)
        torch.testing.assert_close(ours.float(), windowed(q, world, 0, batch, spec), atol=2e-3, rtol=2e-3)
        world.advance(batch)


def test_the_real_page_size_and_tables_padded_to_the_longest() -> None:
    kernel = VarlenStandIn()  # as strict as the real one
    world = World(1, 256, torch.bfloat16, [520, 3, 300])
    varlen, reference = VarlenAttention(256, CPU, kernel), ReferenceAttention()
    for pieces in [(256, 2, 299), (263, 0, 0), (1, 1, 1)]:
        batch = world.batch(pieces)
        varlen.prepare(batch)
        reference.prepare(batch)
        q = world.query(batch, 2)
        world.write(0, batch)
        ours = varlen.attend(0, q, world.pool, batch, AttentionSpec(0.3))
        expected = reference.attend(0, q.float(), world.wide, batch, AttentionSpec(0.3))
        torch.testing.assert_close(ours.float(), expected, atol=2e-2, rtol=2e-2)
        world.advance(batch)
    assert kernel.calls == [(299, 299, (-1, 0), True, 1), (263, 519, (-1, 0), True, 1), (1, 520, (-1, -1), True, 1)]


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    world = World(2, 4, torch.float16, [6, 11, 3])
    varlen = VarlenAttention(4, CPU, VarlenStandIn(4))
    batch = world.batch((6, 11, 3))
    world.write(0, batch)
    q = world.query(batch, 4)
    varlen.prepare(batch)
    together = varlen.attend(0, q, world.pool, batch, AttentionSpec(0.3))
    for span in batch.spans:
        alone = replace(batch, spans=(span._replace(start=0),))
        varlen.prepare(alone)
        one = varlen.attend(0, q[span.start : span.end], world.pool, alone, AttentionSpec(0.3))
        assert torch.equal(one, together[span.start : span.end])


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dtype": torch.float32}, "float32"),
    ({"head_dim": 12}, "head dimension of 12"),
    ({"head_dim": 264}, "head dimension of 264"),
    ({"capability": (7, 5)}, "7.5"),
    ({"has_flash": False}, "no FlashAttention"),
    ({"softcap": 30.0}, "soft cap"),
    ({}, None),
])  # fmt: skip
def test_what_the_kernel_cannot_do_is_known_beforehand(changes: dict[str, object], reason: str | None) -> None:
    o = {"dtype": torch.bfloat16, "head_dim": 64, "capability": (9, 0), "has_flash": True, "softcap": None, **changes}
    shape = KVShape(2, 2, o["head_dim"], o["dtype"])  # type: ignore[arg-type]
    specs = [AttentionSpec(1.0, window=8), AttentionSpec(1.0, softcap=o["softcap"])]  # type: ignore[arg-type]
    why = why_not_varlen(shape, specs, o["capability"], has_flash=o["has_flash"])  # type: ignore[arg-type]
    assert (why is None) == (reason is None)
    assert reason is None or reason in str(why)


def test_what_was_not_prepared_or_cannot_be_done_is_no_wrong_number() -> None:
    world = World(2, 4, torch.float16, [3, 1, 1])
    varlen = VarlenAttention(4, CPU, VarlenStandIn(4))
    batch = world.batch((3, 0, 0))
    q = world.query(batch, 4)
    with pytest.raises(RuntimeError, match="prepare"):
        varlen.attend(0, q, world.pool, batch, AttentionSpec(0.3))
    varlen.prepare(batch)
    with pytest.raises(RuntimeError, match="soft cap"):
        varlen.attend(0, q, world.pool, batch, AttentionSpec(0.3, softcap=1.0))


@pytest.mark.parametrize("page_size", [16, 128, 384])
def test_a_page_size_the_kernel_refuses_is_a_config_error(page_size: int) -> None:
    with pytest.raises(ConfigError, match="256") as caught:
        EngineConfig(device="cuda", block_size=page_size)
    assert caught.value.field == "block_size"
    with pytest.raises(ConfigError):
        EngineConfig(block_size=page_size).block_size_on("cuda")
    assert EngineConfig(block_size=page_size, device="cpu").block_size_on("cpu") == page_size
    world = World(2, page_size, torch.float16, [3])
    varlen = VarlenAttention(page_size, CPU, VarlenStandIn())
    batch = world.batch((3,))
    varlen.prepare(batch)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        varlen.attend(0, world.query(batch, 2), world.pool, batch, AttentionSpec(0.3))


def test_the_default_block_size_is_the_devices() -> None:
    assert EngineConfig().block_size_on("cpu") == 16
    assert EngineConfig().block_size_on("cuda") == 256
    assert EngineConfig(device="cuda", block_size=512).block_size_on("cuda") == 512
