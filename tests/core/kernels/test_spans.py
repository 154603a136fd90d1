"""The table of spans: filled again and again, in the same memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import pytest

from orca_core.kernels import SpanTable

ROWS = [(0, 1, 9, array("i", [5, 3, 7, 9])), (1, 3, 4, (2,)), (4, 1, 5, [8, 6])]


def read(table: SpanTable) -> list[tuple[list[int], list[int]]]:
    """Each span's four numbers, and the blocks the kernels would read for it."""
    c, size = table.c(), table.block_size
    spans = (ctypes.c_int32 * (4 * c.n_spans)).from_address(c.spans)
    found = []
    for i in range(c.n_spans):
        numbers = list(spans[4 * i : 4 * i + 4])
        width = -(-numbers[2] // size)
        found.append((numbers, list((ctypes.c_int32 * width).from_address(c.table + 4 * numbers[3]))))
    return found


def test_the_kernels_find_each_spans_blocks() -> None:
    table = SpanTable.of(ROWS, 4)
    assert read(table) == [([0, 1, 9, 0], [5, 3, 7]), ([1, 3, 4, 3], [2]), ([4, 1, 5, 4], [8, 6])]
    assert table.longest == 9
    table.check_blocks(9)  # block 9 of the first table lies beyond its context
    with pytest.raises(ValueError, match="block outside 0 to 8"):
        table.check_blocks(8)


def test_a_table_is_filled_again_in_the_same_memory() -> None:
    table = SpanTable.of(ROWS, 4)
    before = table.c()
    table.fill(ROWS[1:])
    assert read(table) == [([1, 3, 4, 0], [2]), ([4, 1, 5, 1], [8, 6])]
    assert (table.longest, table.c().spans, table.c().table) == (5, before.spans, before.table)
    table.check_blocks(9)


def test_a_table_grows() -> None:
    rows: list[tuple[int, int, int, Sequence[int]]] = [(i, 1, 40, list(range(i, i + 40))) for i in range(200)]
    table = SpanTable.of([], 1)
    table.fill(rows)
    assert [blocks for _, blocks in read(table)] == [list(blocks) for *_, blocks in rows]
    assert [numbers for numbers, _ in read(table)] == [[i, 1, 40, 40 * i] for i in range(200)]


@pytest.mark.parametrize("block", [-1, 2**31, 2**63])
def test_a_number_that_is_no_block_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match="block outside"):
        SpanTable.of([(0, 1, 2, (1, block))], 1).check_blocks(1 << 20)
