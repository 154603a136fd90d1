"""The CPU kernels' attention against the formula in float32, over a pool where what nobody wrote is not a number."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from orca_core.attention.base import AttentionSpec
from orca_core.attention.cpu import c_spec
from orca_core.kernels import Heads, Kernels, SpanTable
from tests.core.native_rig import difference, every_variant, variant_or_skip


@pytest.fixture(scope="module", params=every_variant())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant_or_skip(request.param)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """``q`` ``[n, n_heads, d]``: the last n positions of ``k``, ``v`` ``[context, n_kv_heads, d]``."""
    group, context = q.shape[1] // k.shape[1], k.shape[0]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,khd->hnk", q.float(), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position, key = torch.arange(context - q.shape[0], context)[:, None], torch.arange(context)
    seen = key <= position
    if spec.window is not None:
        seen &= key > position - spec.window
    return torch.einsum("hnk,khd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@dataclass
class Case:
    """Spans of random requests in a pool, their queries, and the oracle."""

    heads: Heads
    spec: AttentionSpec
    rows: list[tuple[int, int, int, list[int]]]
    block_size: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    oracle: torch.Tensor

    def run(self, kernels: Kernels) -> torch.Tensor:
        table = SpanTable.of(self.rows, self.block_size)
        return kernels.attend(table, self.heads, c_spec(self.spec), self.q, self.keys, self.values)

    def run_row(self, kernels: Kernels, span: int, row: int) -> torch.Tensor:
        """The same row alone: as if the request had nothing behind it, and nobody else were there."""
        first, n, context, blocks = self.rows[span]
        table = SpanTable.of([(0, 1, context - n + row + 1, blocks)], self.block_size)
        q = self.q[first + row : first + row + 1]
        return kernels.attend(table, self.heads, c_spec(self.spec), q, self.keys, self.values)[0]


def make_case(
    rng: random.Random, heads: Heads, spec: AttentionSpec, contexts: list[tuple[int, int]], size: int
) -> Case:
    """``contexts``: rows and context of each span."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    n_blocks = [-(-context // size) for _, context in contexts]
    free = list(range(sum(n_blocks) + 2))
    rng.shuffle(free)
    shape = (len(free), size, heads.n_kv_heads, heads.head_dim)
    keys, values = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))
    flat_keys, flat_values = (x.view(-1, heads.n_kv_heads, heads.head_dim) for x in (keys, values))
    rows, queries, oracle, row = [], [], [], 0
    for (n, context), count in zip(contexts, n_blocks, strict=True):
        blocks = [free.pop() for _ in range(count)]
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(context)])
        for flat in (flat_keys, flat_values):
            flat[slots] = torch.randn(context, *shape[2:], generator=generator).bfloat16()
        queries.append(torch.randn(n, heads.n_heads, heads.head_dim, generator=generator).bfloat16())
        oracle.append(formula(queries[-1], flat_keys[slots], flat_values[slots], spec))
        rows.append((row, n, context, blocks))
        row += n
    return Case(heads, spec, rows, size, torch.cat(queries), keys, values, torch.cat(oracle))


def random_case(rng: random.Random) -> Case:
    n_kv_heads, size = rng.choice([1, 2, 3, 8]), rng.choice([2, 12, 16, 64, 80, 128])
    heads = Heads(n_kv_heads * rng.choice([1, 2, 3, 9]), n_kv_heads, size)
    spec = AttentionSpec(
        size**-0.5 * rng.choice([1, 3]), rng.choice([None, None, 1, 7, 64, 100, 513]), rng.choice([None, None, 5.0])
    )
    contexts = [rng.choice([1, 2, 63, 64, 65, 130, 512, 513, rng.randint(1, 1100)]) for _ in range(rng.randint(1, 4))]
    pieces = [(rng.choice([1, 1, context, rng.randint(1, context)]), context) for context in contexts]
    return make_case(rng, heads, spec, pieces, rng.choice([1, 4, 16, 32]))


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_formula_and_each_row_itself_alone(kernels: Kernels, seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(rng)
    ours = case.run(kernels)
    assert difference(ours, case.oracle) < 1e-2
    for span, (first, n, _, _) in enumerate(case.rows):
        for row in rng.sample(range(n), min(n, 4)):
            assert torch.equal(case.run_row(kernels, span, row), ours[first + row])


def test_the_number_of_threads_changes_nothing(kernels: Kernels) -> None:
    """One long request is cut along its context for two threads, and not for one."""
    case = make_case(random.Random(3), Heads(6, 2, 64), AttentionSpec(0.125), [(1, 3000), (5, 700)], 16)
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results += [case.run(kernels) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert difference(results[0], case.oracle) < 1e-2
    assert all(torch.equal(result, results[0]) for result in results)


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    """The largest score takes all the weight, whichever block it is in."""
    case = make_case(random.Random(4), Heads(2, 1, 32), AttentionSpec(300.0), [(70, 200)], 4)
    assert difference(case.run(kernels), case.oracle) < 1e-2


def test_what_is_not_a_number_stays_visible(kernels: Kernels) -> None:
    """A broken model must not look like a working one."""
    case = make_case(random.Random(5), Heads(2, 1, 32), AttentionSpec(1.0), [(1, 50), (1, 20)], 4)
    case.q[0, 1, 3] = torch.nan
    ours = case.run(kernels)
    assert ours[0, 1].isnan().all()
    assert not ours[0, 0].isnan().any()
    assert not ours[1].isnan().any()


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    case = make_case(random.Random(6), Heads(4, 2, 16), AttentionSpec(1.0), [(1, 5)], 4)
    case.heads = Heads(4, 1, 16)
    with pytest.raises(ValueError, match="do not fit"):
        case.run(kernels)
    case.heads = Heads(2, 2, 16)
    with pytest.raises(ValueError, match="does not fit"):
        case.run(kernels)
    case.heads, case.keys = Heads(4, 2, 16), case.keys.float()
    with pytest.raises(ValueError, match="keys must be"):
        case.run(kernels)
