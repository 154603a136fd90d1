"""From the tensors of a checkpoint to the decoder's fused weights, strict about every name and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from orca_core.errors import ModelLoadError
from orca_core.models.checkpoint import Checkpoint
from orca_core.models.config import ModelConfig
from orca_core.models.decoder import DecoderWeights
from orca_core.models.layers import LayerWeights, Linear

_MAX_LISTED: Final = 8
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"

_DERIVED_SUFFIXES: Final = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")
"""Buffers that old files carry and that follow from the configuration."""


def load_weights(
    source: str, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Load everything, one tensor at a time, into memory of its own. Raises ``ModelLoadError``.

    Names and shapes are checked against the configuration before anything is read.
    """
    check_tensors(source, config, checkpoint.shapes())
    filler = _Filler(checkpoint, dtype, device)
    embedding = filler.stacked([_EMBEDDING])
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(filler, config, f"model.layers.{index}") for index in range(config.n_layers)),
        norm=filler.stacked(["model.norm.weight"]),
        head=embedding if config.tied_head else filler.stacked([_HEAD]),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_head:
        shapes[_HEAD] = (config.vocab_size, hidden)
    for index in range(config.n_layers):
        prefix = f"model.layers.{index}"
        for name, (n_out, n_in, bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (n_out, n_in)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (n_out,)
        for name, size in norms.items():
            shapes[f"{prefix}.{name}.weight"] = (size,)
    return shapes


def check_tensors(source: str, config: ModelConfig, found: dict[str, tuple[int, ...]]) -> None:
    """Every expected tensor is there in its shape, and nothing else is. Raises ``ModelLoadError`` listing what is not.

    Ignored where present: derived rope buffers, and a separate head beside a tied one.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected and not name.endswith(_DERIVED_SUFFIXES) and not (config.tied_head and name == _HEAD)
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

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._shapes = checkpoint.shapes()
        self._dtype = dtype
        self._device = device

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """The named tensors one below the other."""
        rows = [self._shapes[name][0] for name in names]
        tensor = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, n_rows in zip(names, rows, strict=True):
            tensor[start : start + n_rows].copy_(self._checkpoint.load(name))
            start += n_rows
        return tensor

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """The named projections as one."""
        weight = self.stacked([f"{name}.weight" for name in names])
        return Linear(weight, self.stacked([f"{name}.bias" for name in names]) if bias else None)


def _load_layer(filler: _Filler, config: ModelConfig, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = filler.stacked([f"{attention}.q_norm.weight"]), filler.stacked([f"{attention}.k_norm.weight"])
        qk_norm = torch.cat((q_norm.expand(config.n_heads, -1), k_norm.expand(config.n_kv_heads, -1)))
    return LayerWeights(
        attention_norm=filler.stacked([f"{prefix}.input_layernorm.weight"]),
        qkv=filler.linear([f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"], config.qkv_bias),
        qk_norm=qk_norm,
        output=filler.linear([f"{attention}.o_proj"], config.output_bias),
        mlp_norm=filler.stacked([f"{prefix}.post_attention_layernorm.weight"]),
        gate_up=filler.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
        down=filler.linear([f"{mlp}.down_proj"], config.mlp_bias),
    )
