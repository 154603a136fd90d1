"""Attention in plain torch, one request at a time: the oracle for every other backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from orca_core.attention.base import AttentionSpec
from orca_core.batch import Batch, Span
from orca_core.kv import KVPool


@dataclass(frozen=True, slots=True)
class _View:
    """How one span reads its context, the same in all layers.

    ``where``: its slots in the pool, as a slice where its blocks happen to lie one after the other (no copy), else as
    int64 indices. ``mask``: bool ``[n_tokens, context]``, only for a piece in the middle of a prompt.
    """

    where: slice | torch.Tensor
    mask: torch.Tensor | None

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """``[1, n_kv_heads, context, head_dim]`` of a layer's flat K or V."""
        rows = flat[self.where] if isinstance(self.where, slice) else flat.index_select(0, self.where)
        return rows.transpose(0, 1).unsqueeze(0)


class ReferenceAttention:
    """``AttentionBackend`` over ``scaled_dot_product_attention``, on any device."""

    def __init__(self) -> None:
        self._views: tuple[_View, ...] | None = None

    def prepare(self, batch: Batch) -> None:
        """Forget the last iteration. The views need the pool's block size and are built at the first layer."""
        self._views = None

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        if self._views is None:
            self._views = tuple(_view_of(span, pool.block_size, q.device) for span in batch.spans)
        keys, values = pool.flat_keys(layer), pool.flat_values(layer)
        if len(batch.spans) == 1:
            return _attend_span(q, keys, values, batch.spans[0], self._views[0], spec.scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for span, view in zip(batch.spans, self._views, strict=True):
            out[span.start : span.end] = _attend_span(q[span.start : span.end], keys, values, span, view, spec.scale)
        return out


def _view_of(span: Span, block_size: int, device: torch.device) -> _View:
    blocks = span.blocks[: -(-span.context // block_size)]
    first = blocks[0]
    where: slice | torch.Tensor
    if blocks == tuple(range(first, first + len(blocks))):
        where = slice(first * block_size, first * block_size + span.context)
    else:
        starts = torch.tensor(blocks, dtype=torch.int64) * block_size
        slots = (starts[:, None] + torch.arange(block_size)).flatten()[: span.context]
        where = slots.to(device)
    mask = None
    if 1 < span.n_tokens < span.context:
        positions = torch.arange(span.context - span.n_tokens, span.context, device=device)
        mask = positions[:, None] >= torch.arange(span.context, device=device)
    return _View(where, mask)


def _attend_span(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, view: _View, scale: float
) -> torch.Tensor:
    """``q`` ``[n_tokens, n_heads, head_dim]`` of one span; returns its shape."""
    k, v = view.read(keys), view.read(values)
    n_kv_heads = k.shape[1]
    if span.n_tokens == 1:
        # the query heads that share a key head become the rows of one product: K and V are read once, not once a head
        grouped = q.reshape(1, n_kv_heads, -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=view.mask,
        is_causal=view.mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != n_kv_heads,
    )
    return attended.squeeze(0).transpose(0, 1)
