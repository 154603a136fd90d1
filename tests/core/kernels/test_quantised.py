"""Products with weights of 8 and 4 bits against torch in float32 over the numbers they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from orca_core.kernels import Kernels
from orca_core.quantised import GROUP, Format, QuantisedWeight, quantise, two_in_a_byte
from tests.core.native_rig import difference, every_variant, variant_or_skip

FORMATS = {
    "int8": Format(8, grouped=False),
    "int8-grouped": Format(8, grouped=True),
    "int4": Format(4, grouped=True),
    "int4-minimum": Format(4, grouped=True, with_minimum=True),
    "int8-minimum": Format(8, grouped=True, with_minimum=True),
    "int4-whole": Format(4, grouped=False),
}
ROWS = (*range(1, 14), 23, 24, 25, 40)


@pytest.fixture(scope="module", params=every_variant())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant_or_skip(request.param)


def weight_of(kind: Format, n_out: int, n_in: int, seed: int = 0) -> QuantisedWeight:
    """Every integer there is, scales and minima of either sign."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_out, -(-n_in // GROUP) if kind.grouped else 1)
    dtype = torch.float16 if kind.grouped else torch.float32
    if kind.bits == 8:
        integers = torch.randint(-128, 128, (n_out, n_in), generator=generator).to(torch.int8)
    else:
        integers = two_in_a_byte(torch.randint(0, 16, (n_out, n_in), generator=generator).to(torch.uint8))
    scales = torch.randn(shape, generator=generator).to(dtype)
    minima = torch.randn(shape, generator=generator).to(dtype) * 8 if kind.with_minimum else None
    return QuantisedWeight(kind, integers, scales, minima, n_in, torch.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 2), (31, 64), (32, 30), (33, 66), (100, 48), (70, 1538)])
def test_equals_torch_and_rows_do_not_depend_on_each_other(kernels: Kernels, name: str, n_out: int, n_in: int) -> None:
    weight = weight_of(FORMATS[name], n_out, n_in)
    bias = torch.randn(n_out).bfloat16()
    packed = kernels.pack(weight, bias)
    x = torch.randn(max(ROWS), n_in).bfloat16()
    oracle = F.linear(x.double(), weight.dequantised().double(), bias.double())
    alone = torch.cat([kernels.apply(packed, x[i : i + 1]) for i in range(len(x))])
    for n in ROWS:
        ours = kernels.apply(packed, x[:n])
        assert difference(ours, oracle[:n]) < 1e-5
        assert torch.equal(ours, alone[:n])


@pytest.mark.parametrize("name", FORMATS)
def test_random_shapes(kernels: Kernels, name: str) -> None:
    rng = random.Random(0)
    for seed in range(25):
        n_out, n_in, n = rng.randint(1, 200), 2 * rng.randint(1, 150), rng.randint(1, 40)
        weight, x = weight_of(FORMATS[name], n_out, n_in, seed), torch.randn(n, n_in).bfloat16()
        assert difference(kernels.apply(kernels.pack(weight), x), F.linear(x.float(), weight.dequantised())) < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_threads_changes_nothing(kernels: Kernels, name: str) -> None:
    weight, x = weight_of(FORMATS[name], 200, 256), torch.randn(150, 256).bfloat16()
    packed = kernels.pack(weight)
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            results += [kernels.apply(packed, x) for _ in range(5)]
            assert torch.equal(kernels.pack(weight).weight, packed.weight)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_that_is_not_a_number_stays_in_its_output(kernels: Kernels, bits: int) -> None:
    weight = torch.ones(40, 80)
    weight[33, 5] = torch.nan
    weight[7, 79] = torch.inf
    result = kernels.apply(kernels.pack(quantise(weight, bits, torch.bfloat16)), torch.ones(3, 80).bfloat16())
    assert torch.equal(result.isnan().any(0).nonzero().flatten(), torch.tensor([7, 33]))
    assert torch.equal(result[:, 8:33], torch.full((3, 25), 80.0))


def test_parts_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    good = weight_of(FORMATS["int4-minimum"], 6, 64)
    assert good.minima is not None
    for changes in (
        {"n_in": 66}, {"n_in": 128}, {"minima": None}, {"scales": good.scales.float()}, {"scales": good.scales[:, :1]},
        {"minima": good.minima[:5].contiguous()}, {"integers": good.integers[:, :31].contiguous()},
        {"integers": good.integers.to(torch.int8)}, {"format": Format(4, grouped=True)},
        {"format": Format(8, grouped=True, with_minimum=True)}, {"format": Format(2, grouped=True, with_minimum=True)},
    ):  # fmt: skip
        parts = {name: getattr(good, name) for name in QuantisedWeight.__slots__} | changes
        with pytest.raises(ValueError, match=r"must be|do not fit"):
            kernels.pack(QuantisedWeight(**parts))
