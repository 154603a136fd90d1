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
        self._n_known = 0
        self._cos, self._sin = self._known(0)
        self._half = self._cos.shape[1]
        self._rows = np.empty((2, 0, self._half), np.float32)

    def pick(self, positions: np.ndarray, end: int) -> CRope:
        """The C structure of these rows, int64 ``[n_rows]``, all at 0 or above and below ``end``; good until the next
        call.
        """
        n = len(positions)
        if end > self._n_known:
            self._grow(end)
        if n > self._rows.shape[1]:
            self._rows = np.empty((2, max(64, 2 * n), self._half), np.float32)
        cos, sin = self._rows
        # "clip": the one mode in which numpy writes to ``out`` at once; nothing is out of bounds here
        np.take(self._cos, positions, axis=0, out=cos[:n], mode="clip")
        np.take(self._sin, positions, axis=0, out=sin[:n], mode="clip")
        return CRope(cos.ctypes.data, sin.ctypes.data, 2 * self._half)

    def _grow(self, end: int) -> None:
        """Make the table reach ``end``, and further, so that it does not grow with each token."""
        wanted = -(-max(end, min(2 * self._n_known, self._n_known + 4096)) // _PIECE) * _PIECE
        pieces = [self._known(start) for start in range(self._n_known, wanted, _PIECE)]
        self._cos = np.concatenate([self._cos[: self._n_known], *(cos for cos, _ in pieces)])
        self._sin = np.concatenate([self._sin[: self._n_known], *(sin for _, sin in pieces)])
        self._n_known = wanted

    def _known(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = self._rope.angles(torch.arange(start, start + _PIECE))
        return cos.numpy(), sin.numpy()
