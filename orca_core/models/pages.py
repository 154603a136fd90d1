"""Letting go of what was read from a mapped file, and of what was freed: a model takes the memory of its weights."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Final

_PIECE: Final = 1 << 22
"""Elements of a tensor that are read at a time."""


def row_pieces(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a tensor that are read together."""
    width = max(1, shape[1] if len(shape) > 1 else 1)
    step = max(1, _PIECE // width)
    return (slice(begin, begin + step) for begin in range(0, shape[0], step))


def drop_pages(address: int, n_bytes: int) -> None:
    """Give back the pages that lie wholly in a piece of a mapped file; who reads there again reads the file again.

    The file must be mapped without having been written to; memory of another kind loses what it holds.
    """
    if sys.platform != "linux":
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        libc = ctypes.CDLL(None)
        # advice: where it is not taken, nothing is lost but memory
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Give the system back what was freed and lies between what was not: glibc keeps that, and asks for more beside it.

    Elsewhere nothing happens.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
