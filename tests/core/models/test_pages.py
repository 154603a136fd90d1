"""Memory that is given back to the system."""

from __future__ import annotations

import ctypes
import sys

import psutil
import pytest

from orca_core.models.pages import trim_heap

N_BLOCKS, BLOCK = 1600, 64 << 10
"""100 MiB, in blocks that no allocator takes from the system one by one."""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's malloc"
)
def test_what_was_freed_between_what_was_not_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(BLOCK) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:  # the last one lies above them all
        libc.free(block)
    before = psutil.Process().memory_info().rss
    trim_heap()
    after = psutil.Process().memory_info().rss
    libc.free(blocks[-1])
    assert before - after > N_BLOCKS * BLOCK / 2
