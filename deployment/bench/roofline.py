"""How near an iteration on a CPU comes to what the machine allows: the time to read, or to multiply, what it has to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.table import Table

from deployment.bench.machine import CpuShares
from orca_core.attention import AttentionBackend, AttentionSpec
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.kernels import KernelError, find_kernels
from orca_core.kv import KVManager, KVPool
from orca_core.models import AnyDecoder
from orca_core.request import Request
from orca_core.types import GenerationRequest

_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 192
_MATRIX: Final = (512, 1024, 3072)
"""Rows, inputs and outputs of the product that torch is timed on."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do. ``read_gb_s``: by method, the best of several; ``product_gflop_s``: bfloat16, too."""

    read_gb_s: dict[str, float]
    product_gflop_s: dict[str, float]

    @property
    def bytes_per_s(self) -> float:
        """The fastest way to read."""
        return max(self.read_gb_s.values()) * 1e9

    @property
    def flop_per_s(self) -> float:
        """The fastest way to multiply."""
        return max(self.product_gflop_s.values()) * 1e9


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of iteration. ``ms``: the best of ``n_runs``; ``attention_ms``: of it, as measured by itself.

    ``read_ms``, ``product_ms``: reading weights, K and V once, and multiplying, at the ceilings. The floor is the
    larger of the two.
    """

    kind: str
    n_requests: int
    n_rows: int
    context: int
    ms: float
    attention_ms: float
    read_ms: float
    product_ms: float
    n_runs: int
    foreign_cpu: float

    @property
    def floor_ms(self) -> float:
        """What no iteration of this shape can beat."""
        return max(self.read_ms, self.product_ms)

    @property
    def of_floor(self) -> float:
        """1.0 = as fast as the machine allows."""
        return self.ms / self.floor_ms

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"floor_ms": self.floor_ms, "of_floor": self.of_floor}


def measure_ceilings(n_bytes: int, n_runs: int) -> Ceilings:
    """Over ``n_bytes`` of memory, which must be more than the caches hold; on the threads torch has."""
    n_threads = torch.get_num_threads()
    memory = torch.ones(n_bytes // 8, dtype=torch.int64)
    reads = {"torch sum": n_bytes / _best(memory.sum, n_runs) / 1e9}
    rows, n_in, n_out = _MATRIX
    x, weight = torch.randn(rows, n_in).bfloat16(), torch.randn(n_out, n_in).bfloat16()
    seconds = _best(lambda: torch.nn.functional.linear(x, weight), 4 * n_runs)
    products = {"torch linear": 2 * rows * n_in * n_out / seconds / 1e9}
    try:
        kernels = find_kernels()
    except KernelError:
        return Ceilings(reads, products)
    for threads in sorted({1, n_threads}):
        for name, prefetch in (("loads", False), ("prefetched loads", True)):
            rates = [kernels.read_rate(memory, prefetch=prefetch, n_threads=threads) for _ in range(n_runs)]
            reads[f"{name}, {threads} thread(s)"] = max(rates) / 1e9
        products[f"instruction, {threads} thread(s)"] = max(kernels.product_rate(threads) for _ in range(n_runs)) / 1e9
    packed = kernels.pack(weight)
    products["packed linear"] = 2 * rows * n_in * n_out / _best(lambda: kernels.apply(packed, x), 4 * n_runs) / 1e9
    return Ceilings(reads, products)


class Roofline:
    """Runs single iterations of a decoder over a pool of its own."""

    def __init__(self, decoder: AnyDecoder, attention: AttentionBackend, ceilings: Ceilings, n_slots: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._ceilings = ceilings
        self._kv = KVManager(n_slots, _BLOCK_SIZE, 64)
        self._pool = KVPool(decoder.kv_shape, self._kv.n_blocks, _BLOCK_SIZE, decoder.device)

    def increments(self, n_requests: int, n_runs: int, context: int = _CONTEXT) -> Point:
        """One more token for each of ``n_requests`` that have ``context`` tokens."""
        return self._measure("increment", [(context - 1, 1)] * n_requests, n_runs)

    def initiation(self, n_rows: int, n_runs: int) -> Point:
        """A whole prompt."""
        return self._measure("initiation", [(0, n_rows)], n_runs)

    def _measure(self, kind: str, shapes: Sequence[tuple[int, int]], n_runs: int) -> Point:
        config, shape = self._decoder.config, self._decoder.kv_shape
        with self._batch(shapes) as batch, CpuShares() as shares, torch.inference_mode():
            seconds = _best(lambda: self._decoder.next_logits(batch, self._pool, self._attention), n_runs)
            q = torch.zeros(batch.n_tokens, config.n_heads, config.head_dim, dtype=self._decoder.dtype)
            attention = _best(lambda: self._attend(batch, q), 8 * n_runs) * config.n_layers
        contexts, n_rows = sum(span.context for span in batch.spans), batch.n_tokens
        # every row sees half of its own piece and all that was there before
        seen = sum(span.n_tokens * (span.context - span.n_tokens / 2) for span in batch.spans)
        embedding = 0 if config.tied_head else config.vocab_size * config.hidden_size
        head = config.vocab_size * config.hidden_size
        weights = self._decoder.n_parameters - embedding
        flop = 2.0 * (n_rows * (weights - head) + len(batch.spans) * head)
        flop += 4.0 * seen * config.n_heads * config.head_dim * config.n_layers
        n_bytes = self._decoder.weight_bytes + contexts * shape.bytes_per_slot
        return Point(
            kind, len(batch.spans), n_rows, max(span.context for span in batch.spans), 1000 * seconds,
            1000 * attention, 1000 * n_bytes / self._ceilings.bytes_per_s, 1000 * flop / self._ceilings.flop_per_s,
            n_runs, shares.foreign,
        )  # fmt: skip

    def _attend(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        self._attention.prepare(batch)
        return self._attention.attend(0, q, self._pool, batch, AttentionSpec(q.shape[-1] ** -0.5))

    @contextmanager
    def _batch(self, shapes: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        requests = []
        for i, (before, n_rows) in enumerate(shapes):
            ids = tuple((i + 7 * j) % self._decoder.config.vocab_size for j in range(before + n_rows))
            request = Request(GenerationRequest(str(i), ids, 1, seed=0), 0.0)
            if not self._kv.reserve(request.request_id, request.total_tokens):
                raise ValueError(f"{len(shapes)} requests of {len(ids)} tokens do not fit into the pool")
            request.admit(0.0)
            if before:
                self._kv.extend(request.request_id, before)
                request.advance(before)
            requests.append(request)
        yield build_batch([Scheduled(r, n) for r, (_, n) in zip(requests, shapes, strict=True)], self._kv,
                          self._decoder.device)  # fmt: skip
        for request in requests:
            self._kv.release(request.request_id)


def _best(compute: Callable[[], object], n_runs: int) -> float:
    """Seconds of the fastest of ``n_runs``, after one that does not count."""
    compute()
    times = []
    for _ in range(n_runs):
        started = time.perf_counter()
        compute()
        times.append(time.perf_counter() - started)
    return min(times)


def roofline_tables(ceilings: Ceilings, points: Sequence[Point]) -> list[Table]:
    """The ceilings, and one row a shape."""
    limits = Table(title="ceilings", box=None, header_style="bold")
    for name in ("", "rate"):
        limits.add_column(name, justify="right" if name else "left")
    for name, rate in ceilings.read_gb_s.items():
        limits.add_row(f"read: {name}", f"{rate:.1f} GB/s")
    for name, rate in ceilings.product_gflop_s.items():
        limits.add_row(f"bfloat16 product: {name}", f"{rate:.0f} GFLOP/s")
    table = Table(title="iterations, ms", box=None, header_style="bold")
    for name in ("requests x rows", "context", "all", "attention", "read", "product", "/floor", "foreign"):
        table.add_column(name, justify="right")
    for point in points:
        rows = point.n_rows // point.n_requests
        table.add_row(
            f"{point.n_requests} x {rows}", str(point.context), f"{point.ms:.1f}", f"{point.attention_ms:.1f}",
            f"{point.read_ms:.1f}", f"{point.product_ms:.1f}", f"{point.of_floor:.2f}", f"{point.foreign_cpu:.0%}",
        )  # fmt: skip
    return [limits, table]
