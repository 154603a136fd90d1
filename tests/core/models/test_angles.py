"""Rotary angles that are picked, against those that are computed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from orca_core.models.angles import PickedAngles
from orca_core.models.rope import RotaryTable
from tests.core.native_rig import CPU


class Frequencies(RotaryTable):
    """A table of ``half`` made-up frequencies."""

    def __init__(self, half: int) -> None:
        self._frequencies, self._scaling = torch.linspace(1.0, 0.001, half, device=CPU), 1.25


def read(angles: PickedAngles, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels would read: a copy of cosines and sines ``[n_rows, half]``."""
    c = angles.pick(np.array(positions), max(positions) + 1)
    n = len(positions) * c.rotated // 2
    cos, sin = ((ctypes.c_float * n).from_address(pointer) for pointer in (c.cos, c.sin))
    return tuple(np.array(part).reshape(len(positions), -1) for part in (cos, sin))  # type: ignore[return-value]


@pytest.mark.parametrize("half", [1, 10, 32])
def test_picked_angles_are_the_computed_ones(half: int) -> None:
    rope = Frequencies(half)
    angles = PickedAngles(rope)
    for positions in ([0], [3, 127, 128, 5], list(range(300)), [5000, 2], [1] * 70):
        expected = rope.angles(torch.tensor(positions))
        for ours, theirs in zip(read(angles, positions), expected, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-7)


def test_a_position_has_the_same_angles_whenever_it_is_met() -> None:
    early, late = PickedAngles(Frequencies(10)), PickedAngles(Frequencies(10))
    positions = [0, 1, 127, 128, 200, 999]
    at_once = read(late, positions)
    for i, position in enumerate(positions):
        for alone, together in zip(read(early, [position]), at_once, strict=True):
            assert np.array_equal(alone[0], together[i])


def test_angles_are_picked_into_the_same_memory() -> None:
    angles = PickedAngles(Frequencies(4))
    first, second = angles.pick(np.arange(16), 16), angles.pick(np.arange(1, 17), 17)
    assert (first.cos, first.sin) == (second.cos, second.sin)
