"""What the decoder needs of an attention backend."""

from __future__ import annotations

from typing import Protocol

import torch

from orca_core.batch import Batch
from orca_core.kv import KVPool


class AttentionBackend(Protocol):
    """Causal attention, per request over its own K and V: the one operation selective batching does not batch."""

    def prepare(self, batch: Batch) -> None:
        """Called once an iteration, before the first layer: build what all layers share (masks, tables)."""

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, scale: float) -> torch.Tensor:
        """Attention of ``q`` ``[n_tokens, n_heads, head_dim]`` over the pool; this batch's K and V are in it already.

        Grouped-query: query head h reads K/V head ``h // (n_heads // n_kv_heads)``. Returns the shape of ``q``.
        """
        ...
