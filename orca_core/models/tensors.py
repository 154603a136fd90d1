"""Which tensors a checkpoint of a configuration has, by name and shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from orca_core.errors import ModelLoadError
from orca_core.models.config import ModelConfig
from orca_core.models.layout import Layout

_MAX_LISTED: Final = 8


def count_parameters(config: ModelConfig, layout: Layout) -> int:
    """Trained numbers; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config, layout).values())


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
