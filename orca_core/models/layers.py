"""The parts of one decoder layer, as functions of their weights, over the flat ``[n_tokens, hidden]`` batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch.nn import functional as F

from orca_core.models.rope import rotate
from orca_core.quantised import Weight, plain

ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` ``[out, in]`` and ``bias`` ``[out]`` or ``None``."""

    weight: Weight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[n_rows, in]`` to ``[n_rows, out]``."""
        return F.linear(x, plain(self.weight), self.bias)

    def tensors(self) -> Iterator[Weight]:
        """Weight, and bias if any."""
        yield self.weight
        if self.bias is not None:
            yield self.bias


class Norm(Protocol):
    """A norm over the last dimension. Keeps shape and dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., size]`` to the same."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its weights."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square norm: float32 inside, cast back, then times ``weight`` (Llama)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Norm``."""
        yield self.weight


@dataclass(frozen=True, slots=True)
class WideRmsNorm:
    """Root-mean-square norm with a float32 ``weight``, cast back after it: 1 + w keeps its small part (Gemma)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        wide = x.to(torch.float32)
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Norm``."""
        yield self.weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Norm by mean and variance, times ``weight``, plus ``bias``."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Norm``."""
        yield from (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class WidthNorm:
    """Norm of q over all of its heads together, and of k over all of its; ``[n_tokens, heads of both, head_dim]``."""

    q: Norm
    k: Norm
    n_heads: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        q, k = x[:, : self.n_heads], x[:, self.n_heads :]
        return torch.cat((self.q(q.flatten(1)), self.k(k.flatten(1))), dim=-1).view(x.shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Norm``."""
        yield from (*self.q.tensors(), *self.k.tensors())


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, fused for fewer and larger products.

    ``qkv``: q, k, v stacked. ``gate_up``: gate, up stacked, or up alone where there is no gate. ``qk_norm``: takes
    ``[n_tokens, n_heads + n_kv_heads, head_dim]``. The other norms lie before and behind attention and MLP, inside the
    residual. ``None`` = the architecture has none there.
    """

    attention_norm: Norm | None
    qkv: Linear
    qk_norm: Norm | None
    output: Linear
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear
    down: Linear
    mlp_post_norm: Norm | None

    def tensors(self) -> Iterator[Weight]:
        """Every tensor once, but for those of ``qk_norm``."""
        parts: tuple[Linear | Norm | None, ...] = (
            self.attention_norm, self.qkv, self.output, self.attention_post_norm,
            self.mlp_norm, self.gate_up, self.down, self.mlp_post_norm,
        )  # fmt: skip
        for part in parts:
            if part is not None:
                yield from part.tensors()


def project_qkv(
    x: torch.Tensor,
    layer: LayerWeights,
    n_heads: int,
    n_kv_heads: int,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q ``[n_tokens, n_heads, head_dim]`` and k, and v, both ``[n_tokens, n_kv_heads, head_dim]``."""
    heads = layer.qkv(x).view(x.shape[0], n_heads + 2 * n_kv_heads, -1)
    qk, v = heads[:, : n_heads + n_kv_heads], heads[:, n_heads + n_kv_heads :]
    if layer.qk_norm is not None:
        qk = layer.qk_norm(qk)
    if rope is not None:
        qk = rotate(qk, *rope)
    return qk[:, :n_heads], qk[:, n_heads:], v


def gated_mlp(x: torch.Tensor, layer: LayerWeights, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``down(activation(gate(x)) * up(x))``, ``[n_tokens, hidden]`` to the same."""
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(activation(gate) * up)


def plain_mlp(x: torch.Tensor, layer: LayerWeights, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``down(activation(up(x)))``, ``[n_tokens, hidden]`` to the same."""
    return layer.down(activation(layer.gate_up(x)))
