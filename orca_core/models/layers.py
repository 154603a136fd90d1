"""The parts of one decoder layer, as functions of their weights, over the flat ``[n_tokens, hidden]`` batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from orca_core.models.rope import rotate


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` ``[out, in]`` and ``bias`` ``[out]`` or ``None``."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[n_rows, in]`` to ``[n_rows, out]``."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, fused for fewer and larger products.

    ``qkv``: q, k, v stacked. ``gate_up``: gate, up stacked. ``qk_norm``: ``[n_heads + n_kv_heads, head_dim]``, the
    weight of q's norm once a query head, then that of k's once a key head; ``None`` = the architecture has none.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension: float32 inside, cast back, then times ``weight``."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def project_qkv(
    x: torch.Tensor,
    layer: LayerWeights,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q ``[n_tokens, n_heads, head_dim]`` and k, and v, both ``[n_tokens, n_kv_heads, head_dim]``."""
    heads = layer.qkv(x).view(x.shape[0], n_heads + 2 * n_kv_heads, -1)
    qk, v = heads[:, : n_heads + n_kv_heads], heads[:, n_heads + n_kv_heads :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk, layer.qk_norm, eps)
    qk = rotate(qk, *rope)
    return qk[:, :n_heads], qk[:, n_heads:], v


def mlp(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """Gated SiLU feed-forward, ``[n_tokens, hidden]`` to the same."""
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)
