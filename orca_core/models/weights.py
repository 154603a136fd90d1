"""From the tensors of a checkpoint to the decoder's fused weights, strict about every name and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from orca_core.models.checkpoint import Checkpoint
from orca_core.models.config import ModelConfig
from orca_core.models.decoder import DecoderWeights
from orca_core.models.layers import LayerNorm, LayerWeights, Linear, Norm, RmsNorm, WideRmsNorm, WidthNorm
from orca_core.models.layout import Layout
from orca_core.models.tensors import check_tensors, count_parameters
from orca_core.quantised import QuantisedWeight, Weight, quantise, stack

_MATRIX_BITS: Final = 8
"""Of embedding and head: what a head of 4 bits loses, no other weight makes up for."""


def load_weights(reader: WeightReader) -> DecoderWeights:
    """Load everything, one tensor at a time, into memory of its own. Raises ``ModelLoadError``."""
    embedding = reader.embedding()
    return DecoderWeights(
        embedding=embedding,
        positions=reader.positions(),
        layers=tuple(reader.layer(index) for index in range(reader.config.n_layers)),
        norm=reader.norm(),
        head=embedding if reader.config.tied_head else reader.head(),
    )


class WeightReader:
    """Reads a checkpoint part by part: tensors are allocated at their final size, then filled piece by piece.

    ``bits``: of the projections' weights, 8 or 4, head and embedding having 8; ``None`` = they are in ``dtype``.

    Raises ``ModelLoadError``: names and shapes are checked against the configuration before anything is read.
    """

    def __init__(
        self, source: str, config: ModelConfig, layout: Layout, checkpoint: Checkpoint, dtype: torch.dtype,
        device: torch.device, bits: int | None = None,
    ) -> None:  # fmt: skip
        self._shapes = checkpoint.shapes()
        check_tensors(source, config, layout, self._shapes)
        self.config = config
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.bits = bits
        self._checkpoint = checkpoint

    @property
    def n_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        return count_parameters(self.config, self.layout)

    def embedding(self) -> Weight:
        """``[vocab, hidden]``."""
        return self._matrix(f"{self.layout.prefix}{self.layout.embedding}.weight")

    def head(self) -> Weight:
        """``[vocab, hidden]``, of a model whose head is not its embedding."""
        return self._matrix(f"{self.layout.head}.weight")

    def positions(self) -> torch.Tensor | None:
        """Learned ones, ``[max_position_embeddings, hidden]``, where there are some."""
        name = self.layout.positions
        return None if name is None else self._stacked([f"{self.layout.prefix}{name}.weight"])

    def norm(self) -> Norm:
        """The last one."""
        return self._norm(f"{self.layout.prefix}{self.layout.norm}")

    def layer(self, index: int) -> LayerWeights:
        """Everything of one layer."""
        config, layout, prefix = self.config, self.layout, self.layout.layer(index)
        q_norm, k_norm = layout.qk_norm
        return LayerWeights(
            attention_norm=self._optional_norm(prefix, layout.attention_norm),
            qkv=self._linear([prefix + name for name in layout.qkv], config.qkv_bias),
            qk_norm=self._qk_norm(prefix + q_norm, prefix + k_norm),
            output=self._linear([prefix + layout.output], config.output_bias),
            attention_post_norm=self._optional_norm(prefix, layout.attention_post_norm),
            mlp_norm=self._optional_norm(prefix, layout.mlp_norm),
            gate_up=self._linear([prefix + name for name in layout.gate_up], config.mlp_bias),
            down=self._linear([prefix + layout.down], config.mlp_bias),
            mlp_post_norm=self._optional_norm(prefix, layout.mlp_post_norm),
        )

    def _stacked(
        self, names: Sequence[str], *, transposed: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The named tensors one below the other; ``transposed``: each of them is turned first."""
        shapes = [self._shapes[name][::-1] if transposed else self._shapes[name] for name in names]
        n_rows = sum(shape[0] for shape in shapes)
        tensor = torch.empty((n_rows, *shapes[0][1:]), dtype=dtype or self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            part, row = tensor[start : start + shape[0]], 0
            for values in self._checkpoint.pieces(name):
                (part.T if transposed else part)[row : row + values.shape[0]].copy_(values)
                row += values.shape[0]
            start += shape[0]
        return tensor

    def _linear(self, names: Sequence[str], bias: bool) -> Linear:
        """The named projections as one."""
        weights = [f"{name}.weight" for name in names]
        transposed = self.layout.transposed
        weight: Weight
        if self.bits is None:
            weight = self._stacked(weights, transposed=transposed)
        else:
            weight = self._quantised(weights, self.bits, transposed=transposed)
        return Linear(weight, self._stacked([f"{name}.bias" for name in names]) if bias else None)

    def _matrix(self, name: str) -> Weight:
        """Embedding or head."""
        return self._stacked([name]) if self.bits is None else self._quantised([name], _MATRIX_BITS)

    def _quantised(self, names: Sequence[str], bits: int, *, transposed: bool = False) -> QuantisedWeight:
        """The named tensors one below the other: as stored, where all of them are alike, in at most ``bits``."""
        stored = [None if transposed else self._checkpoint.quantised(name, self.dtype) for name in names]
        parts = [part for part in stored if part is not None and part.format.bits <= bits]
        if len(parts) == len(names) and len({part.format for part in parts}) == 1:
            return stack(parts)
        if transposed:
            return stack([quantise(self._checkpoint.load(name).T, bits, self.dtype) for name in names])
        return stack([quantise(each, bits, self.dtype) for name in names for each in self._checkpoint.pieces(name)])

    def _norm(self, name: str) -> Norm:
        """The named norm, of the kind the configuration says."""
        if self.config.norm == "layer":
            weight, bias = self._stacked([f"{name}.weight"]), self._stacked([f"{name}.bias"])
            return LayerNorm(weight, bias, self.config.norm_eps)
        return self._rms(self._rms_weight(name))

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        """The named norm of a layer, if it has one there."""
        return None if name is None else self._norm(prefix + name)

    def _qk_norm(self, q_name: str, k_name: str) -> Norm | None:
        """The norms of q and k as one over the heads of both."""
        n_heads, n_kv_heads = self.config.n_heads, self.config.n_kv_heads
        if self.config.qk_norm is None:
            return None
        if self.config.qk_norm == "width":
            return WidthNorm(self._norm(q_name), self._norm(k_name), n_heads)
        q, k = self._rms_weight(q_name), self._rms_weight(k_name)
        return self._rms(torch.cat((q.expand(n_heads, -1), k.expand(n_kv_heads, -1))))

    def _rms_weight(self, name: str) -> torch.Tensor:
        if self.config.norm == "rms":
            return self._stacked([f"{name}.weight"])
        return self._stacked([f"{name}.weight"], dtype=torch.float32) + self.layout.norm_offset

    def _rms(self, weight: torch.Tensor) -> Norm:
        kind = RmsNorm if self.config.norm == "rms" else WideRmsNorm
        return kind(weight, self.config.norm_eps)
