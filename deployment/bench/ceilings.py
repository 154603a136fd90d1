"""The two ceilings of a CPU: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional as F

from orca_core.kernels import KernelError, find_kernels

_MATRIX: Final = (512, 1024, 3072)
"""Rows, inputs and outputs of the product that is timed."""
_SQUARE: Final = (1024, 1024, 1024)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do. ``read_gb_s``, ``product_gflop_s``: by method, each the best of several runs.

    ``product_dtype``: of the numbers that were multiplied.
    """

    read_gb_s: dict[str, float]
    product_gflop_s: dict[str, float]
    product_dtype: str = "bfloat16"

    @property
    def bytes_per_s(self) -> float:
        """The fastest way to read."""
        return max(self.read_gb_s.values()) * 1e9

    @property
    def flop_per_s(self) -> float:
        """The fastest way to multiply."""
        return max(self.product_gflop_s.values()) * 1e9

    def record(self) -> dict[str, Any]:
        """For JSON: the fastest, and all."""
        return {
            "read_gb_s": self.bytes_per_s / 1e9,
            "product_gflop_s": self.flop_per_s / 1e9,
            "product_dtype": self.product_dtype,
            "reads": self.read_gb_s,
            "products": self.product_gflop_s,
        }


def measure_ceilings(n_bytes: int, n_runs: int, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Over ``n_bytes`` of memory, which must be more than the caches hold; on the threads torch has.

    ``dtype``: of the product. What the CPU kernels can do counts for bfloat16 alone: they multiply nothing else.
    """
    memory = torch.ones(n_bytes // 8, dtype=torch.int64)
    reads = {"torch sum": n_bytes / best_s(memory.sum, n_runs) / 1e9}
    products = {f"torch linear, {n_in} to {n_out}": _linear_rate((rows, n_in, n_out), 2 * n_runs, dtype)
                for rows, n_in, n_out in (_MATRIX, _SQUARE)}  # fmt: skip
    if dtype == torch.bfloat16:
        _add_kernels(memory, n_runs, reads, products)
    return Ceilings(reads, products, str(dtype).removeprefix("torch."))


def _add_kernels(memory: torch.Tensor, n_runs: int, reads: dict[str, float], products: dict[str, float]) -> None:
    """What the CPU kernels can do, where there are some."""
    try:
        kernels = find_kernels()
    except KernelError:
        return
    for threads in sorted({1, torch.get_num_threads()}):
        for name, prefetch in (("loads", False), ("prefetched loads", True)):
            rates = [kernels.read_rate(memory, prefetch=prefetch, n_threads=threads) for _ in range(n_runs)]
            reads[f"{name}, {threads} thread(s)"] = max(rates) / 1e9
        products[f"instruction, {threads} thread(s)"] = max(kernels.product_rate(threads) for _ in range(n_runs)) / 1e9
    rows, n_in, n_out = _MATRIX
    packed, x = kernels.pack(torch.randn(n_out, n_in).bfloat16()), torch.randn(rows, n_in).bfloat16()
    seconds = best_s(lambda: kernels.apply(packed, x), 2 * n_runs)
    products["packed linear"] = 2 * rows * n_in * n_out / seconds / 1e9


def _linear_rate(sizes: tuple[int, int, int], n_runs: int, dtype: torch.dtype) -> float:
    """GFLOP/s of torch's product of rows ``[n, n_in]`` with a weight ``[n_out, n_in]``."""
    rows, n_in, n_out = sizes
    x, weight = torch.randn(rows, n_in).to(dtype), torch.randn(n_out, n_in).to(dtype)
    return 2 * rows * n_in * n_out / best_s(lambda: F.linear(x, weight), n_runs) / 1e9


def best_s(compute: Callable[[], object], n_runs: int) -> float:
    """Seconds of the fastest of ``n_runs``, after one that does not count."""
    compute()
    times = []
    for _ in range(n_runs):
        started = time.perf_counter()
        compute()
        times.append(time.perf_counter() - started)
    return min(times)
