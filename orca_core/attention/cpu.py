"""Attention in the CPU kernels: all spans of a batch in one call, in bfloat16."""

from __future__ import annotations

import torch

from orca_core.attention.base import AttentionSpec
from orca_core.batch import Batch
from orca_core.kernels import Heads, Kernels, SpanTable
from orca_core.kernels.structs import CAttentionSpec
from orca_core.kv import KVPool


class NativeAttention:
    """``AttentionBackend`` for a bfloat16 pool on a CPU.

    A row's result does not depend on the batch it is in, the pieces of its prompt, or the number of threads.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._table: SpanTable | None = None

    def prepare(self, batch: Batch) -> None:
        """Forget the last iteration; the table needs the pool's block size and is built at the first layer."""
        self._table = None

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        """See ``AttentionBackend.attend``. Raises ``ValueError`` for anything but bfloat16."""
        if self._table is None:
            self._table = span_table(batch, pool)
        heads = Heads(q.shape[1], pool.shape.n_kv_heads, pool.shape.head_dim)
        return self._kernels.attend(self._table, heads, c_spec(spec), q, pool.keys[layer], pool.values[layer])


def span_table(batch: Batch, pool: KVPool) -> SpanTable:
    """The batch's spans and block tables as the kernels read them. Raises ``ValueError`` for a block there is not."""
    rows = [(span.start, span.n_tokens, span.context, span.blocks) for span in batch.spans]
    table = SpanTable.of(rows, pool.block_size)
    low, high = torch.aminmax(table.blocks)
    if low < 0 or high >= pool.n_blocks:
        raise ValueError(f"a block outside 0 to {pool.n_blocks}")
    return table


def c_spec(spec: AttentionSpec) -> CAttentionSpec:
    """The C structure of a layer's attention."""
    return CAttentionSpec(spec.scale, spec.softcap or 0.0, spec.window or 0)
