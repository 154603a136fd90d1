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
            self._table = SpanTable(pool.block_size)
            fill_table(self._table, batch, pool.n_blocks)
        heads = Heads(q.shape[1], pool.shape.n_kv_heads, pool.shape.head_dim)
        return self._kernels.attend(self._table, heads, c_spec(spec), q, pool.keys[layer], pool.values[layer])


def fill_table(table: SpanTable, batch: Batch, n_blocks: int) -> None:
    """Write the batch's spans and block tables. Raises ``ValueError`` for a block there is not."""
    table.fill([(span.start, span.n_tokens, span.context, span.blocks) for span in batch.spans])
    table.check_blocks(n_blocks)


def c_spec(spec: AttentionSpec) -> CAttentionSpec:
    """The C structure of a layer's attention."""
    return CAttentionSpec(spec.scale, spec.softcap or 0.0, spec.window or 0)
