"""Batches of increments alone, replayed from captured CUDA graphs.

An increment is little work for a GPU and many kernels for the host to launch; a captured graph is launched as one. It
always computes the same shapes at the same addresses, so there is one graph for each of a few batch sizes, its inputs
lie in static columns, and a batch that is smaller is padded: the rows nobody asked for write their K and V into a spare
block of the pool that no request ever holds, and read only that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from orca_core.attention.cuda import VarlenAttention, VarlenTables, running_total
from orca_core.batch import Batch, Span
from orca_core.kv import KVPool
from orca_core.models import Decoder
from orca_core.staging import StaticColumns

logger = logging.getLogger(__name__)

Computation = Callable[[], torch.Tensor]


class GraphRunner(Protocol):
    """Turns a computation over static tensors into one that can be repeated cheaply."""

    def capture(self, compute: Computation) -> Computation:
        """Run ``compute`` and remember it. The returned function repeats it over what its inputs hold then.

        Its result is the same tensor each time, valid until anything captured here is repeated.
        """
        ...


class CudaGraphRunner:
    """``GraphRunner`` on a GPU. All graphs share one private pool of memory: only one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Computation) -> Computation:
        """See ``GraphRunner``."""
        # once before, on the same stream: libraries set themselves up in their first call, which cannot be captured
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the process do meanwhile is no error
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def bucket_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … and ``max_batch_size`` itself, smallest first."""
    sizes = [1]
    while sizes[-1] < max_batch_size:
        sizes.append(min(2 * sizes[-1], max_batch_size))
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One captured batch size."""

    size: int
    inputs: StaticColumns
    replay: Computation


class IncrementGraphs:
    """Logits of batches in which every request has one row.

    ``max_context``: tokens of the longest request. ``spare_block``: a block of ``pool`` that no request ever holds.
    Captures in its constructor, the largest batch first, so that the smaller ones fit into its memory.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: VarlenAttention,
        runner: GraphRunner,
        *,
        max_batch_size: int,
        max_context: int,
        spare_block: int,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = attention
        self._spare_block = spare_block
        self._width = -(-max_context // pool.block_size)
        largest_first = reversed(bucket_sizes(max_batch_size))
        self._buckets = [self._capture(size, runner) for size in largest_first][::-1]

    def fits(self, batch: Batch) -> bool:
        """Whether ``run`` takes that batch."""
        return len(batch.spans) == batch.n_tokens and len(batch.spans) <= self._buckets[-1].size

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits float32 ``[n_spans, vocab]``, one row a span, valid until the next call."""
        n = len(batch.spans)
        bucket = next(bucket for bucket in self._buckets if bucket.size >= n)
        bucket.inputs.refresh(self._inputs(batch.spans, bucket.size))
        return bucket.replay()[:n]

    @torch.inference_mode()
    def _capture(self, size: int, runner: GraphRunner) -> _Bucket:
        inputs = StaticColumns(self._inputs((), size), self._decoder.device)
        tables = VarlenTables(
            inputs["cu_seq_q"], inputs["cu_seq_k"], inputs["seqused_k"], inputs["block_table"],
            max_q=1, max_k=self._width * self._pool.block_size,
        )  # fmt: skip
        nothing = inputs["slots"][:0]
        batch = Batch((), inputs["tokens"], inputs["positions"], inputs["slots"], sample_rows=nothing)

        # not over self: graphs that are let go must take their memory with them at once
        decoder, pool, attention = self._decoder, self._pool, self._attention

        def compute() -> torch.Tensor:
            attention.use(tables)
            return decoder.logits(decoder.forward(batch, pool, attention))

        return _Bucket(size, inputs, runner.capture(compute))

    def _inputs(self, spans: Sequence[Span], size: int) -> dict[str, np.ndarray]:
        """Values of all columns for these spans, padded to ``size`` rows: token 0 at position 0 of the spare block."""
        block_size = self._pool.block_size
        tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        slots = np.full(size, self._spare_block * block_size, np.int64)
        table = np.full((size, self._width), self._spare_block, np.int32)
        for i, span in enumerate(spans):
            position = span.context - 1
            tokens[i], positions[i] = span.request.token_ids[position], position
            slots[i] = span.blocks[position // block_size] * block_size + position % block_size
            n_blocks = position // block_size + 1
            table[i, :n_blocks] = span.blocks[:n_blocks]
        seqused_k = (positions + 1).astype(np.int32)
        return {
            "tokens": tokens,
            "positions": positions,
            "slots": slots,
            "cu_seq_q": np.arange(size + 1, dtype=np.int32),
            "cu_seq_k": running_total(seqused_k),
            "seqused_k": seqused_k,
            "block_table": table,
        }
