"""The key/value memory of one engine: a ledger of slots, and the paged pool the slots live in.

A *slot* is room for one token's K and V in all layers. The ledger promises slots to requests at admission (Orca,
Algorithm 1: ``n_rsrv``); the pool hands out *blocks* of ``block_size`` slots against that promise as tokens come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orca_core.errors import InvariantError


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


@dataclass(slots=True)
class _Holding:
    """What one admitted request holds."""

    n_reserved: int
    blocks: list[int]
    n_used: int = 0


class KVManager:
    """The only book of slots in a replica. Used by the loop thread alone; knows nothing of tensors.

    The ledger counts slots exactly as the paper does, so a demand of precisely ``n_slots`` fits. Blocks round up, at
    most by ``block_size - 1`` slots a request; therefore the pool has ``max_batch_size`` blocks more than ``n_slots``
    needs, and a request that holds a reservation can never fail to get its next block.
    """

    def __init__(self, n_slots: int, block_size: int, max_batch_size: int) -> None:
        self.n_slots = n_slots
        self.block_size = block_size
        self.max_holders = max_batch_size
        self.n_blocks = self.blocks_needed(n_slots, block_size, max_batch_size)
        self._free: list[int] = list(range(self.n_blocks - 1, -1, -1))
        self._held: dict[str, _Holding] = {}
        self._n_reserved = 0
        self._n_used = 0

    @staticmethod
    def blocks_needed(n_slots: int, block_size: int, max_batch_size: int) -> int:
        """Blocks of the pool behind a ledger of ``n_slots``."""
        return -(-n_slots // block_size) + max_batch_size

    @property
    def reserved_slots(self) -> int:
        """Slots promised to admitted requests (``n_rsrv``)."""
        return self._n_reserved

    @property
    def used_slots(self) -> int:
        """Slots that hold a token's K and V now."""
        return self._n_used

    @property
    def n_holders(self) -> int:
        """Admitted requests."""
        return len(self._held)

    def fits(self, n_slots: int) -> bool:
        """Whether a reservation of ``n_slots`` can be made now."""
        return self._n_reserved + n_slots <= self.n_slots and len(self._held) < self.max_holders

    def reserve(self, request_id: str, n_slots: int) -> bool:
        """Promise ``n_slots`` to a request, once, at admission. False, and nothing changed, where they don't fit."""
        if request_id in self._held:
            raise InvariantError(f"request {request_id} reserved twice")
        if n_slots < 1 or not self.fits(n_slots):
            return False
        self._held[request_id] = _Holding(n_slots, [])
        self._n_reserved += n_slots
        return True

    def extend(self, request_id: str, n_tokens: int) -> list[int]:
        """Take the next ``n_tokens`` slots of a request's reservation; returns their flat indices in the pool."""
        holding = self._held[request_id]
        start, end = holding.n_used, holding.n_used + n_tokens
        if n_tokens < 1 or end > holding.n_reserved:
            raise InvariantError(f"request {request_id} wants slot {end} of {holding.n_reserved} reserved")
        while len(holding.blocks) * self.block_size < end:
            holding.blocks.append(self._free.pop())
        holding.n_used = end
        self._n_used += n_tokens
        size, blocks = self.block_size, holding.blocks
        return [blocks[i // size] * size + i % size for i in range(start, end)]

    def blocks(self, request_id: str) -> list[int]:
        """The request's block table: block i holds its tokens ``i * block_size`` and on. A copy."""
        return list(self._held[request_id].blocks)

    def release(self, request_id: str) -> None:
        """Return everything a request holds, used or only reserved. A request without a reservation is no error."""
        holding = self._held.pop(request_id, None)
        if holding is None:
            return
        self._free.extend(reversed(holding.blocks))
        self._n_reserved -= holding.n_reserved
        self._n_used -= holding.n_used

    def check_integrity(self, *, idle: bool = False) -> None:
        """Audit the ledger; ``idle``: nothing may be held at all. Raises ``InvariantError`` saying what is off."""
        held = [block for holding in self._held.values() for block in holding.blocks]
        every = held + self._free
        if len(every) != self.n_blocks or len(set(every)) != self.n_blocks:
            raise InvariantError(f"{len(held)} held + {len(self._free)} free blocks, but {self.n_blocks} there are")
        reserved = sum(holding.n_reserved for holding in self._held.values())
        used = sum(holding.n_used for holding in self._held.values())
        if reserved != self._n_reserved or used != self._n_used:
            raise InvariantError(f"books say {self._n_reserved}/{self._n_used} slots, holdings {reserved}/{used}")
        if not used <= reserved <= self.n_slots:
            raise InvariantError(f"used {used} <= reserved {reserved} <= n_slots {self.n_slots} does not hold")
        for request_id, holding in self._held.items():
            if len(holding.blocks) != -(-holding.n_used // self.block_size):
                raise InvariantError(f"request {request_id}: {len(holding.blocks)} blocks for {holding.n_used} slots")
        if idle and self._held:
            raise InvariantError(f"idle, but {len(self._held)} requests hold {reserved} slots")
