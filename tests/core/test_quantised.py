"""Rounding to integers: near what was given, and no farther than the format allows."""

from __future__ import annotations

import pytest
import torch

from orca_core.quantised import GROUP, quantise, stack


def matrix(n_out: int, n_in: int) -> torch.Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out + n_in))


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (3, 31), (5, 32), (40, 33), (7, 100)])
def test_eight_bits_are_within_half_a_step_of_a_row(n_out: int, n_in: int) -> None:
    values = matrix(n_out, n_in)
    made = quantise(values, 8, torch.float32)
    step = values.abs().amax(1, keepdim=True) / 127
    assert ((made.dequantised() - values).abs() <= step / 2 * 1.001).all()
    assert made.integers.abs().amax(1).eq(127).all()
    assert made.shape == values.shape
    assert made.nbytes == n_out * (n_in + 4)


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (3, 31), (5, 32), (40, 33), (7, 100)])
def test_four_bits_are_within_a_step_of_a_group(n_out: int, n_in: int) -> None:
    values = matrix(n_out, n_in)
    made = quantise(values, 4, torch.float32)
    for begin in range(0, n_in, GROUP):
        group, found = (each[:, begin : begin + GROUP] for each in (values, made.dequantised()))
        farthest = group.abs().amax(1, keepdim=True)
        # half a step inside; a whole one at the end opposite to the farthest, where the integers are one short
        assert ((found - group).abs() <= farthest / 8 * 1.001).all()
        inside = group.abs() < farthest * 7.5 / 8
        assert ((found - group).abs() <= farthest / 16 * 1.02 + ~inside * farthest).all()
    assert made.nbytes == n_out * ((n_in + 1) // 2 + 2 * made.scales.shape[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_chunks_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(9, 70)
    values[4] = 0
    whole = quantise(values, bits, torch.float32).dequantised()
    assert not whole[4].any()
    monkeypatch.setattr("orca_core.quantised._CHUNK", 150)
    assert torch.equal(quantise(values, bits, torch.float32).dequantised(), whole)


@pytest.mark.parametrize("bits", [8, 4])
def test_stacked_is_quantised_one_by_one(bits: int) -> None:
    parts = [quantise(matrix(n, 66), bits, torch.bfloat16) for n in (1, 4, 3)]
    expected = torch.cat([part.dequantised() for part in parts])
    assert expected.dtype == torch.bfloat16
    assert torch.equal(stack(parts).dequantised(), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_freed_takes_no_memory(bits: int) -> None:
    made = quantise(matrix(4, 64), bits, torch.float32)
    made.free()
    assert made.integers.untyped_storage().nbytes() == made.scales.untyped_storage().nbytes() == 0
