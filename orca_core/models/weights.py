"""From the tensors of a checkpoint to the decoder's fused weights, strict about every name and shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from orca_core.errors import ModelLoadError
from orca_core.models.checkpoint import Checkpoint
from orca_core.models.config import ModelConfig
from orca_core.models.decoder import DecoderWeights
from orca_core.models.layers import LayerNorm, LayerWeights, Linear, Norm, RmsNorm, WideRmsNorm, WidthNorm
from orca_core.models.layout import Layout
from orca_core.quantised import QuantisedWeight, Weight, quantise, stack

_MAX_LISTED: Final = 8
_MATRIX_BITS: Final = 8
"""Of embedding and head: what a head of 4 bits loses, no other weight makes up for."""


def load_weights(
    source: str,
    config: ModelConfig,
    layout: Layout,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    bits: int | None = None,
) -> DecoderWeights:
    """Load everything, one tensor at a time, into memory of its own. Raises ``ModelLoadError``.

    ``bits``: of the projections' weights, 8 or 4, head and embedding having 8; ``None`` = they are in ``dtype``.

    Names and shapes are checked against the configuration before anything is read.
    """
    check_tensors(source, config, layout, checkpoint.shapes())
    filler = _Filler(config, layout, checkpoint, dtype, device, bits)
    embedding = filler.matrix(f"{layout.prefix}{layout.embedding}.weight")
    positions = None if layout.positions is None else filler.stacked([f"{layout.prefix}{layout.positions}.weight"])
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(filler, config, layout, layout.layer(index)) for index in range(config.n_layers)),
        norm=filler.norm(f"{layout.prefix}{layout.norm}"),
        head=embedding if config.tied_head else filler.matrix(f"{layout.head}.weight"),
        positions=positions,
    )


def expected_shapes(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration has."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{layout.prefix}{layout.embedding}.weight": (config.vocab_size, hidden)}
    if layout.positions is not None:
        shapes[f"{layout.prefix}{layout.positions}.weight"] = (config.max_position_embeddings, hidden)
    if not config.tied_head:
        shapes[f"{layout.head}.weight"] = (config.vocab_size, hidden)
    norm_parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    for part in norm_parts:
        shapes[f"{layout.prefix}{layout.norm}.{part}"] = (hidden,)
    for index in range(config.n_layers):
        prefix = layout.layer(index)
        for name, n_out, n_in, bias in _projections(config, layout):
            shapes[f"{prefix}{name}.weight"] = (n_in, n_out) if layout.transposed else (n_out, n_in)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (n_out,)
        for name, size in _norms(config, layout):
            shapes.update({f"{prefix}{name}.{part}": (size,) for part in norm_parts})
    return shapes


def _projections(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, int, int, bool]]:
    """Name, rows, columns and whether there is a bias, of each projection of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    qkv, gate_up = (q, kv, kv), (inner, inner) if config.gated_mlp else (inner,)
    for names, sizes, n_in, bias in (
        (layout.qkv, qkv, hidden, config.qkv_bias),
        ((layout.output,), (hidden,), q, config.output_bias),
        (layout.gate_up, gate_up, hidden, config.mlp_bias),
        ((layout.down,), (hidden,), inner, config.mlp_bias),
    ):
        stacked = (sum(sizes),) if len(names) == 1 else sizes
        for name, n_out in zip(names, stacked, strict=True):
            yield name, n_out, n_in, bias


def _norms(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, int]]:
    """Name and size of each norm of a layer."""
    for name in (layout.attention_norm, layout.attention_post_norm, layout.mlp_norm, layout.mlp_post_norm):
        if name is not None:
            yield name, config.hidden_size
    if config.qk_norm is not None:
        for name, n_heads in zip(layout.qk_norm, (config.n_heads, config.n_kv_heads), strict=True):
            yield name, config.head_dim * (n_heads if config.qk_norm == "width" else 1)


def check_tensors(source: str, config: ModelConfig, layout: Layout, found: dict[str, tuple[int, ...]]) -> None:
    """Every expected tensor is there in its shape, and nothing else is. Raises ``ModelLoadError`` listing what is not.

    Ignored where present: derived buffers, and a separate head beside a tied one.
    """
    expected = expected_shapes(config, layout)
    head = f"{layout.head}.weight"
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected and not name.endswith(layout.derived) and not (config.tied_head and name == head)
    ]
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    parts = [
        f"{title}: {_listed(names)}"
        for title, names in (("missing tensors", missing), ("unexpected tensors", unexpected), ("wrong shapes", wrong))
        if names
    ]
    if parts:
        raise ModelLoadError(source, "; ".join(parts))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(sorted(names)[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


class _Filler:
    """Makes the decoder's tensors: allocated once at their final size, then filled from the checkpoint."""

    def __init__(
        self, config: ModelConfig, layout: Layout, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device,
        bits: int | None,
    ) -> None:  # fmt: skip
        self._config = config
        self._layout = layout
        self._checkpoint = checkpoint
        self._shapes = checkpoint.shapes()
        self._dtype = dtype
        self._device = device
        self._bits = bits

    def stacked(
        self, names: Sequence[str], *, transposed: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The named tensors one below the other; ``transposed``: each of them is turned first."""
        shapes = [self._shapes[name][::-1] if transposed else self._shapes[name] for name in names]
        n_rows = sum(shape[0] for shape in shapes)
        tensor = torch.empty((n_rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            values = self._checkpoint.load(name)
            tensor[start : start + shape[0]].copy_(values.T if transposed else values)
            start += shape[0]
        return tensor

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """The named projections as one."""
        weights = [f"{name}.weight" for name in names]
        transposed = self._layout.transposed
        weight: Weight
        if self._bits is None:
            weight = self.stacked(weights, transposed=transposed)
        else:
            weight = self._quantised(weights, self._bits, transposed=transposed)
        return Linear(weight, self.stacked([f"{name}.bias" for name in names]) if bias else None)

    def matrix(self, name: str) -> Weight:
        """Embedding or head."""
        return self.stacked([name]) if self._bits is None else self._quantised([name], _MATRIX_BITS)

    def _quantised(self, names: Sequence[str], bits: int, *, transposed: bool = False) -> QuantisedWeight:
        """The named tensors one below the other: as stored, where all of them are alike, in at most ``bits``."""
        stored = [None if transposed else self._checkpoint.quantised(name, self._dtype) for name in names]
        parts = [part for part in stored if part is not None and part.format.bits <= bits]
        if len(parts) == len(names) and len({part.format for part in parts}) == 1:
            return stack(parts)
        loaded = (self._checkpoint.load(name) for name in names)
        return stack([quantise(each.T if transposed else each, bits, self._dtype) for each in loaded])

    def norm(self, name: str) -> Norm:
        """The named norm, of the kind the configuration says."""
        if self._config.norm == "layer":
            weight, bias = self.stacked([f"{name}.weight"]), self.stacked([f"{name}.bias"])
            return LayerNorm(weight, bias, self._config.norm_eps)
        return self._rms(self._rms_weight(name))

    def optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        """The named norm of a layer, if it has one there."""
        return None if name is None else self.norm(prefix + name)

    def qk_norm(self, q_name: str, k_name: str) -> Norm | None:
        """The norms of q and k as one over the heads of both."""
        n_heads, n_kv_heads = self._config.n_heads, self._config.n_kv_heads
        if self._config.qk_norm is None:
            return None
        if self._config.qk_norm == "width":
            return WidthNorm(self.norm(q_name), self.norm(k_name), n_heads)
        q, k = self._rms_weight(q_name), self._rms_weight(k_name)
        return self._rms(torch.cat((q.expand(n_heads, -1), k.expand(n_kv_heads, -1))))

    def _rms_weight(self, name: str) -> torch.Tensor:
        if self._config.norm == "rms":
            return self.stacked([f"{name}.weight"])
        return self.stacked([f"{name}.weight"], dtype=torch.float32) + self._layout.norm_offset

    def _rms(self, weight: torch.Tensor) -> Norm:
        kind = RmsNorm if self._config.norm == "rms" else WideRmsNorm
        return kind(weight, self._config.norm_eps)


def _load_layer(filler: _Filler, config: ModelConfig, layout: Layout, prefix: str) -> LayerWeights:
    q_norm, k_norm = layout.qk_norm
    return LayerWeights(
        attention_norm=filler.optional_norm(prefix, layout.attention_norm),
        qkv=filler.linear([prefix + name for name in layout.qkv], config.qkv_bias),
        qk_norm=filler.qk_norm(prefix + q_norm, prefix + k_norm),
        output=filler.linear([prefix + layout.output], config.output_bias),
        attention_post_norm=filler.optional_norm(prefix, layout.attention_post_norm),
        mlp_norm=filler.optional_norm(prefix, layout.mlp_norm),
        gate_up=filler.linear([prefix + name for name in layout.gate_up], config.mlp_bias),
        down=filler.linear([prefix + layout.down], config.mlp_bias),
        mlp_post_norm=filler.optional_norm(prefix, layout.mlp_post_norm),
    )
