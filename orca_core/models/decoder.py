"""The decoder: written once, driven by ``ModelConfig``, over the flat batch of selective batching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from orca_core.attention.base import AttentionBackend, AttentionSpec
from orca_core.batch import Batch
from orca_core.kv import KVPool, KVShape
from orca_core.models.config import ModelConfig
from orca_core.models.layers import LayerWeights, Linear, mlp, project_qkv, rms_norm
from orca_core.models.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. ``head`` ``[vocab, hidden]`` is ``embedding`` itself where the two are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        yield self.embedding
        yield self.norm
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from (layer.attention_norm, layer.mlp_norm)
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                yield linear.weight
                if linear.bias is not None:
                    yield linear.bias


class Decoder:
    """A loaded decoder-only transformer. Stateless between calls: K and V live in the pool. Call in inference mode."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._rope = RotaryTable(config, self.device)
        self._spec = AttentionSpec(config.head_dim**-0.5)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, of what flows between layers, and of K and V."""
        return self._weights.embedding.dtype

    @property
    def kv_shape(self) -> KVShape:
        """What one slot of this model holds."""
        return KVShape(self.config.n_layers, self.config.n_kv_heads, self.config.head_dim, self.dtype)

    @property
    def n_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        count = sum(tensor.numel() for tensor in self._weights.tensors())
        # q and k each have one norm weight that all their heads share
        return count + (2 * self.config.head_dim * self.config.n_layers if self.config.qk_norm else 0)

    def forward(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """Hidden rows ``[n_tokens, hidden]`` after the last layer (before the final norm, see ``logits``).

        Writes K and V of every row of the batch into ``pool``. ``attention.prepare(batch)`` was called before.
        """
        rope = self._rope.at(batch.positions, self.dtype)
        hidden = F.embedding(batch.tokens, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attention(index, layer, hidden, rope, batch, pool, attention)
            hidden = hidden + mlp(rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps), layer)
        return hidden

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[n_rows, vocab]``, from rows of what ``forward`` returned."""
        normed = rms_norm(hidden_rows, self._weights.norm, self.config.rms_norm_eps)
        return F.linear(normed, self._weights.head).to(torch.float32)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        pool: KVPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        x = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        q, k, v = project_qkv(x, layer, config.n_heads, config.n_kv_heads, config.rms_norm_eps, rope)
        pool.write(index, batch.slots, k, v)
        attended = attention.attend(index, q, pool, batch, self._spec)
        return layer.output(attended.reshape(hidden.shape[0], -1))


__all__ = ["Decoder", "DecoderWeights", "LayerWeights", "Linear"]
