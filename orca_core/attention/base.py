"""What the decoder needs of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from orca_core.batch import Batch
from orca_core.kv import KVPool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends, beside being causal.

    ``scale``: on the products of q and k. ``window``: a row sees the last ``window`` positions, its own included;
    ``None`` = all before it. ``softcap``: scores become ``softcap * tanh(score / softcap)`` before the softmax;
    ``None`` = not.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Causal attention, per request over its own K and V: the one operation selective batching does not batch."""

    def prepare(self, batch: Batch) -> None:
        """Called once an iteration, before the first layer: build what all layers share (masks, tables)."""

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        """Attention of ``q`` ``[n_tokens, n_heads, head_dim]`` over the pool; this batch's K and V are in it already.

        Grouped-query: query head h reads K/V head ``h // (n_heads // n_kv_heads)``. Returns the shape of ``q``.
        """
        ...
