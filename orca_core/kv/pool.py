"""The paged pool: the tensors that the slots live in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot holds. ``n_kv_heads`` and ``head_dim`` are those of the model's K and V."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """The K and V tensors, one pair a layer, each ``[n_blocks, block_size, n_kv_heads, head_dim]``.

    This is the paged layout that ``torch.nn.attention.varlen.varlen_attn`` reads through a block table. A flat slot
    index is ``block * block_size + offset``.
    """

    def __init__(self, shape: KVShape, n_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.n_blocks = n_blocks
        self.block_size = block_size
        size = (n_blocks, block_size, shape.n_kv_heads, shape.head_dim)
        # zeros, not empty: pages are touched now, so that memory that is not there is missed at start, not under load
        self.keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.n_layers)]
        self.values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.n_layers)]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V ``[n_tokens, n_kv_heads, head_dim]`` at the flat ``slots`` (int64, ``[n_tokens]``)."""
        self.flat_keys(layer).index_copy_(0, slots, k)
        self.flat_values(layer).index_copy_(0, slots, v)

    def flat_keys(self, layer: int) -> torch.Tensor:
        """View ``[n_blocks * block_size, n_kv_heads, head_dim]`` of a layer's K."""
        return self.keys[layer].view(-1, self.shape.n_kv_heads, self.shape.head_dim)

    def flat_values(self, layer: int) -> torch.Tensor:
        """View ``[n_blocks * block_size, n_kv_heads, head_dim]`` of a layer's V."""
        return self.values[layer].view(-1, self.shape.n_kv_heads, self.shape.head_dim)
