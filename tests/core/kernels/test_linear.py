"""Packed products against torch in float32."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from orca_core.kernels import Kernels
from tests.core.native_rig import difference, every_variant, kernels_or_skip, variant_or_skip

ROWS = (*range(1, 14), 23, 24, 25, 60)
"""All row counts of one pass, and passes of unequal size."""


@pytest.fixture(scope="module", params=every_variant())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant_or_skip(request.param)


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 2), (31, 64), (32, 30), (33, 66), (100, 48), (960, 576), (70, 1536)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_torch(kernels: Kernels, n_out: int, n_in: int, with_bias: bool) -> None:
    random = torch.Generator().manual_seed(n_out)
    weight = torch.randn(n_out, n_in, generator=random).bfloat16()
    bias = torch.randn(n_out, generator=random).bfloat16() if with_bias else None
    packed = kernels.pack(weight, bias)
    x = torch.randn(max(ROWS), n_in, generator=random).bfloat16()
    oracle = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    alone = torch.cat([kernels.apply(packed, x[i : i + 1]) for i in range(len(x))])
    for n in ROWS:
        ours = kernels.apply(packed, x[:n])
        assert difference(ours, oracle[:n]) < 1e-5
        assert torch.equal(ours, alone[:n])


def test_the_number_of_threads_changes_nothing(kernels: Kernels) -> None:
    weight, x = torch.randn(200, 256).bfloat16(), torch.randn(150, 256).bfloat16()
    packed = kernels.pack(weight)
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            results += [kernels.apply(packed, x) for _ in range(20)]
            assert torch.equal(kernels.pack(weight).weight, packed.weight)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_weight_that_is_not_a_number_stays_in_its_output(kernels: Kernels) -> None:
    weight = torch.ones(40, 8, dtype=torch.bfloat16)
    weight[33, 5] = torch.nan
    result = kernels.apply(kernels.pack(weight), torch.ones(3, 8, dtype=torch.bfloat16))
    assert torch.equal(result.isnan().any(0).nonzero().flatten(), torch.tensor([33]))
    assert (result[:, :33] == 8).all()


@pytest.mark.parametrize("change", [
    lambda w: w.float(), lambda w: w[:, :7], lambda w: w.T, lambda w: w[0], lambda w: w[:, :7].contiguous(),
    lambda w: w.to("meta"), lambda w: w[:, :0].contiguous(),
])  # fmt: skip
def test_what_does_not_fit_is_refused(kernels: Kernels, change: object) -> None:
    weight = torch.ones(6, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be|cannot be packed"):
        kernels.pack(change(weight))  # type: ignore[operator]
    packed = kernels.pack(weight)
    with pytest.raises(ValueError, match=r"must be|do not fit"):
        kernels.apply(packed, change(weight))  # type: ignore[operator]


def test_random_shapes(kernels: Kernels) -> None:
    rng = random.Random(0)
    for _ in range(40):
        n_out, n_in, n = rng.randint(1, 200), 2 * rng.randint(1, 150), rng.randint(1, 40)
        weight, x = torch.randn(n_out, n_in).bfloat16(), torch.randn(n, n_in).bfloat16()
        assert difference(kernels.apply(kernels.pack(weight), x), F.linear(x.float(), weight.float())) < 1e-5


def product_on_two_threads(kernels: Kernels, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(2)
    return kernels.apply(kernels.pack(weight), x)


def test_a_forked_child_has_workers_of_its_own() -> None:
    """Its parent's did not come with it, and waiting for them would be for ever."""
    kernels = kernels_or_skip()
    weight, x = torch.randn(300, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    before = torch.get_num_threads()
    expected = product_on_two_threads(kernels, weight, x)
    torch.set_num_threads(before)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        values = pool.apply(product_in_lists, (weight.float().tolist(), x.float().tolist()))
    assert torch.equal(torch.tensor(values), expected)


def product_in_lists(weight: list[list[float]], x: list[list[float]]) -> list[list[float]]:
    made = product_on_two_threads(kernels_or_skip(), torch.tensor(weight).bfloat16(), torch.tensor(x).bfloat16())
    return made.tolist()


def test_threads_of_python_that_come_at_once_share_nothing(kernels: Kernels) -> None:
    """Two engines of one process: one has the workers, the other computes alone."""
    weight, x = torch.randn(2000, 512).bfloat16(), torch.randn(9, 512).bfloat16()
    packed = kernels.pack(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = kernels.apply(packed, x)
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: kernels.apply(packed, x), range(80)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, expected) for result in results)
