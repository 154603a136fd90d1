"""The spans of a batch as the kernels read them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Self

import numpy as np

from orca_core.kernels.structs import CSpans

_INT32: Final = "i"
_START: Final = (64, 1024)  # spans and entries there is room for at first


class SpanTable:
    """int32 ``[n_spans, 4]`` of first row, rows, context and first entry among the blocks; the block tables one behind
    the other.

    One table serves one iteration after the other: ``fill`` writes over what was there, in the same memory unless it
    has to grow. ``longest``: tokens of the longest context.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.longest = 0
        self._n_spans = 0
        self._n_entries = 0
        self._spans = array(_INT32, bytes(4 * 4 * _START[0]))
        self._entries = array(_INT32, bytes(4 * _START[1]))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, Sequence[int]]], block_size: int) -> Self:
        """A new table, filled. Raises as ``fill`` does."""
        table = cls(block_size)
        table.fill(rows)
        return table

    def fill(self, rows: Iterable[tuple[int, int, int, Sequence[int]]]) -> None:
        """From first row, number of rows, context and block table of each span.

        Raises ``ValueError`` for a block table that is too short, or a number that is none of 32 bits.
        """
        size, at, longest, first = self.block_size, 0, 0, 0
        spans, entries = self._spans, self._entries
        try:
            for row, n_rows, context, blocks in rows:
                width = (context + size - 1) // size
                if len(blocks) < width:
                    raise ValueError("a block table is shorter than its context")
                if at == len(spans):
                    spans = self._spans = _grown(spans, at + 4)
                if first + width > len(entries):
                    entries = self._entries = _grown(entries, first + width)
                table = blocks if len(blocks) == width else blocks[:width]
                entries[first : first + width] = table if isinstance(table, array) else array(_INT32, table)
                spans[at], spans[at + 1], spans[at + 2], spans[at + 3] = row, n_rows, context, first
                at, first, longest = at + 4, first + width, context if context > longest else longest
        except OverflowError as error:
            raise ValueError("a block outside what 32 bits hold") from error
        self._n_spans, self._n_entries, self.longest = at // 4, first, longest

    def check_blocks(self, n_blocks: int) -> None:
        """Raises ``ValueError`` for a block there is not."""
        # as numbers without a sign: what is negative is far too large then
        entries = np.frombuffer(self._entries, np.uint32, self._n_entries)
        if np.maximum.reduce(entries, initial=0) >= n_blocks:
            raise ValueError(f"a block outside 0 to {n_blocks}")

    def c(self) -> CSpans:
        """The C structure. It points into this table, which must outlive it, and not be filled meanwhile."""
        return CSpans(self._spans.buffer_info()[0], self._entries.buffer_info()[0], self._n_spans, self.block_size)


def _grown(old: array[int], n: int) -> array[int]:
    """A copy with room for ``n``, and for as many again."""
    return old + array(_INT32, bytes(4 * (2 * n - len(old))))
