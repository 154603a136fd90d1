"""The rotary angles of an iteration's rows, picked from a table instead of computed."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from orca_core.kernels.structs import CRope
from orca_core.models.rope import RotaryTable

_PIECE: Final = 128
"""Positions computed at a time, from a multiple of it: a position has the same angles whenever it is first met."""


class PickedAngles:
    """Cosines and sines of all positions met so far, and those of one iteration's rows, which the kernels read.

    Grows to the longest context there is, ``8 * rotated elements / 2`` bytes a position. To compute them anew each
    time takes several calls, and libraries that wake their threads for a few hundred numbers: on a busy machine
    milliseconds.
    """

    def __init__(self, rope: RotaryTable) -> None:
        self._rope = rope
        self._table = self._piece(0)[:, :0]
        self._half = self._table.shape[2]
        self._rows = np.empty((2, 0, self._half), np.float32)
        self._c = CRope()

    def pick(self, positions: np.ndarray, end: int) -> CRope:
        """The C structure of these rows, int64 ``[n_rows]``, all at 0 or above and below ``end``; good until the next
        call.
        """
        n = len(positions)
        if end > self._table.shape[1]:
            self._grow(end)
        if n != self._rows.shape[1]:
            self._rows = np.empty((2, n, self._half), np.float32)
            self._c = CRope(self._rows[0].ctypes.data, self._rows[1].ctypes.data, 2 * self._half)
        # "clip": the one mode in which numpy writes to ``out`` at once; nothing is out of bounds here
        np.take(self._table, positions, axis=1, out=self._rows, mode="clip")
        return self._c

    def _grow(self, end: int) -> None:
        """Make the table reach ``end``, and further, so that it does not grow with each token."""
        n_known = self._table.shape[1]
        wanted = -(-max(end, min(2 * n_known, n_known + 4096)) // _PIECE) * _PIECE
        pieces = [self._piece(start) for start in range(n_known, wanted, _PIECE)]
        self._table = np.concatenate([self._table, *pieces], axis=1)

    def _piece(self, start: int) -> np.ndarray:
        """Cosines and sines of ``_PIECE`` positions, ``[2, n, half]``."""
        return np.stack([part.numpy() for part in self._rope.angles(torch.arange(start, start + _PIECE))])
