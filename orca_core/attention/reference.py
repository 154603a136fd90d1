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
    """How one span reads its context, the same in all layers of one window.

    ``where``: the slots it sees in the pool, as a slice where its blocks happen to lie one after the other (no copy),
    else as int64 indices. ``mask``: bool ``[n_tokens, slots seen]``; ``None`` where a single row sees all of them, or
    where the rows are a whole prompt and nothing but causality hides a slot.
    """

    where: slice | torch.Tensor
    mask: torch.Tensor | None

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """``[1, n_kv_heads, slots seen, head_dim]`` of a layer's flat K or V."""
        rows = flat[self.where] if isinstance(self.where, slice) else flat.index_select(0, self.where)
        return rows.transpose(0, 1).unsqueeze(0)


class ReferenceAttention:
    """``AttentionBackend`` over ``scaled_dot_product_attention``, on any device; softcapped scores are written out."""

    def __init__(self) -> None:
        self._views: dict[int | None, tuple[_View, ...]] = {}

    def prepare(self, batch: Batch) -> None:
        """Forget the last iteration. The views need the pool's block size and are built at the first layer of each
        window.
        """
        self._views = {}

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        views = self._views.get(spec.window)
        if views is None:
            views = tuple(_view_of(span, pool.block_size, q.device, spec.window) for span in batch.spans)
            self._views[spec.window] = views
        keys, values = pool.flat_keys(layer), pool.flat_values(layer)
        if len(batch.spans) == 1:
            return _attend_span(q, keys, values, views[0], spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for span, view in zip(batch.spans, views, strict=True):
            out[span.start : span.end] = _attend_span(q[span.start : span.end], keys, values, view, spec)
        return out


def _view_of(span: Span, block_size: int, device: torch.device, window: int | None) -> _View:
    row = span.context - span.n_tokens
    first = 0 if window is None else max(0, row + 1 - window)  # what lies before, not even the first row sees
    n_skipped = first // block_size
    blocks = list(span.blocks[n_skipped : -(-span.context // block_size)])
    start, length = first - n_skipped * block_size, span.context - first
    where: slice | torch.Tensor
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        start += blocks[0] * block_size
        where = slice(start, start + length)
    else:
        starts = torch.tensor(blocks, dtype=torch.int64) * block_size
        slots = (starts[:, None] + torch.arange(block_size)).flatten()[start : start + length]
        where = slots.to(device)
    is_whole_prompt = row == 0 and (window is None or span.context <= window)
    if span.n_tokens == 1 or is_whole_prompt:
        return _View(where, None)
    positions = torch.arange(row, span.context, device=device)[:, None]
    seen = torch.arange(first, span.context, device=device)
    mask = positions >= seen
    return _View(where, mask if window is None else mask & (seen > positions - window))


def _attend_span(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: _View, spec: AttentionSpec
) -> torch.Tensor:
    """``q`` ``[n_tokens, n_heads, head_dim]`` of one span; returns its shape."""
    k, v = view.read(keys), view.read(values)
    if spec.softcap is not None:
        return _attend_softcapped(q, k, v, view.mask, spec.scale, spec.softcap)
    n_kv_heads = k.shape[1]
    if q.shape[0] == 1:
        # the query heads that share a key head become the rows of one product: K and V are read once, not once a head
        grouped = q.reshape(1, n_kv_heads, -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, k, v, scale=spec.scale).reshape(q.shape)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=view.mask,
        is_causal=view.mask is None,
        scale=spec.scale,
        enable_gqa=q.shape[1] != n_kv_heads,
    )
    return attended.squeeze(0).transpose(0, 1)


def _attend_softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """What ``scaled_dot_product_attention`` cannot do. Scores and softmax are float32."""
    n_tokens = q.shape[0]
    grouped = q.reshape(n_tokens, k.shape[1], -1, q.shape[-1]).permute(1, 2, 0, 3)
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [n_kv_heads, 1, slots seen, head_dim]: the heads of a group share it
    scores = softcap * torch.tanh((grouped @ k.transpose(-1, -2)).to(torch.float32) * (scale / softcap))
    if mask is None and n_tokens > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    attended = scores.softmax(dim=-1).to(q.dtype) @ v
    return attended.permute(2, 0, 1, 3).reshape(q.shape)
