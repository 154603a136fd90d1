"""The decoder: written once, driven by ``ModelConfig``, over the flat batch of selective batching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from orca_core.attention.base import AttentionBackend, AttentionSpec
from orca_core.batch import Batch
from orca_core.kv import KVPool, KVShape
from orca_core.models.config import ModelConfig
from orca_core.models.layers import ACTIVATIONS, LayerWeights, Linear, Norm, gated_mlp, plain_mlp, project_qkv
from orca_core.models.rope import RotaryTable
from orca_core.quantised import QuantisedWeight, Weight, free, plain


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. ``head`` ``[vocab, hidden]`` is ``embedding`` itself where the two are tied. ``positions``
    ``[max_position_embeddings, hidden]``: learned ones, where the architecture has them.
    """

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Weight
    positions: torch.Tensor | None = None

    def tensors(self) -> Iterator[Weight]:
        """Every tensor once, but for norms of q and k."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions
        yield from self.norm.tensors()
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from layer.tensors()

    def dequantised(self) -> DecoderWeights:
        """The same without a quantised weight; those of this one are freed, one after the other."""

        def linear(given: Linear) -> Linear:
            return Linear(_dequantised(given.weight), given.bias)

        embedding = _dequantised(self.embedding)
        layers = tuple(
            replace(
                layer,
                qkv=linear(layer.qkv),
                output=linear(layer.output),
                gate_up=linear(layer.gate_up),
                down=linear(layer.down),
            )
            for layer in self.layers
        )
        head = embedding if self.head is self.embedding else _dequantised(self.head)
        return replace(self, embedding=embedding, layers=layers, head=head)


def _dequantised(weight: Weight) -> torch.Tensor:
    made = plain(weight)
    if made is not weight:
        free(weight)
    return made


class DecoderFrame:
    """What a decoder is without its weights, whoever computes it: ``dtype`` and ``device`` are theirs.

    ``attention_specs``: how each layer attends, first to last. ``rope_tables``: those its layers rotate by;
    ``rope_of``: which of them each layer does, ``None`` = it does not.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.rope_tables = [RotaryTable(config, rope, device) for rope in ropes]
        self.rope_of = [None if layer.rope is None else ropes.index(layer.rope) for layer in config.layers]
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_specs = tuple(
            AttentionSpec(scale, layer.window, config.attention_softcap) for layer in config.layers
        )
        # rounded as the weights are, as it was in training
        factor = config.embedding_scale
        self.embedding_scale = None if factor is None else float(torch.tensor(factor, dtype=dtype))

    @property
    def kv_shape(self) -> KVShape:
        """What one slot of this model holds."""
        return KVShape(self.config.n_layers, self.config.n_kv_heads, self.config.head_dim, self.dtype)


class Decoder(DecoderFrame):
    """A loaded decoder-only transformer. Stateless between calls: K and V live in the pool. Call in inference mode.

    With quantised weights it is right, but slow: they are dequantised in every call. ``dtype`` is of the weights, of
    what flows between layers, and of K and V.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        super().__init__(config, weights.embedding.dtype, weights.embedding.device)
        self.weights = weights
        self._activation = ACTIVATIONS[config.activation]
        self._mlp = gated_mlp if config.gated_mlp else plain_mlp

    @property
    def n_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        config = self.config
        # a norm of q or k has one weight that all its heads share, or one a head
        n_shared = {None: 0, "head": 2, "width": config.n_heads + config.n_kv_heads}[config.qk_norm]
        count = sum(tensor.numel() for tensor in self.weights.tensors())
        return count + n_shared * config.head_dim * config.n_layers

    @property
    def weight_bytes(self) -> int:
        """See ``AnyDecoder``."""
        read = sum(tensor.nbytes for tensor in self.weights.tensors())
        return read if self.weights.head is self.weights.embedding else read - self.weights.embedding.nbytes

    @property
    def is_quantised(self) -> bool:
        """Whether there is a quantised weight."""
        return any(isinstance(tensor, QuantisedWeight) for tensor in self.weights.tensors())

    def next_logits(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor | None:
        """See ``AnyDecoder``."""
        attention.prepare(batch)
        hidden = self.forward(batch, pool, attention)
        if batch.sample_rows.shape[0] == 0:
            return None
        return self.logits(hidden.index_select(0, batch.sample_rows))

    def forward(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """Hidden rows ``[n_tokens, hidden]`` after the last layer (before the final norm, see ``logits``).

        Writes K and V of every row of the batch into ``pool``. ``attention.prepare(batch)`` was called before.
        """
        rotations = [table.at(batch.positions, self.dtype) for table in self.rope_tables]
        hidden = self._embed(batch)
        for index, layer in enumerate(self.weights.layers):
            table = self.rope_of[index]
            rope = None if table is None else rotations[table]
            x = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
            q, k, v = project_qkv(x, layer, self.config.n_heads, self.config.n_kv_heads, rope)
            pool.write(index, batch.slots, k, v)
            attended = attention.attend(index, q, pool, batch, self.attention_specs[index])
            x = layer.output(attended.reshape(hidden.shape[0], -1))
            hidden = hidden + (x if layer.attention_post_norm is None else layer.attention_post_norm(x))
            x = hidden if layer.mlp_norm is None else layer.mlp_norm(hidden)
            x = self._mlp(x, layer, self._activation)
            hidden = hidden + (x if layer.mlp_post_norm is None else layer.mlp_post_norm(x))
        return hidden

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[n_rows, vocab]``, from rows of what ``forward`` returned."""
        logits = F.linear(self.weights.norm(hidden_rows), plain(self.weights.head)).to(torch.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embed(self, batch: Batch) -> torch.Tensor:
        hidden = F.embedding(batch.tokens, plain(self.weights.embedding))
        if self.embedding_scale is not None:
            hidden = hidden * self.embedding_scale
        if self.weights.positions is not None:
            hidden = hidden + F.embedding(batch.positions, self.weights.positions)
        return hidden


__all__ = ["Decoder", "DecoderFrame", "DecoderWeights", "LayerWeights", "Linear"]
