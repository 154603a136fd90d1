"""What a config.json says layer by layer: which rope, and which window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from orca_core.models.config import LayerConfig, RopeConfig
from orca_core.models.fields import Fields
from orca_core.models.hf_rope import read_rope

LayerReader = Callable[[Fields, int, int], tuple[LayerConfig, ...]]
"""From fields, number of layers and head_dim. Raises ``ModelLoadError``."""

_PHI3_ROPES: Final[Mapping[str, str]] = MappingProxyType({"su": "longrope", "yarn": "longrope"})


def _plain_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """All alike, and none has a window."""
    types = _layer_types(fields, n_layers) or ()
    if any(kind != "full_attention" for kind in types) or fields.flag("use_sliding_window", default=False):
        raise fields.error("use_sliding_window", "must be false: this architecture has no sliding windows")
    return (LayerConfig(read_rope(fields, head_dim)),) * n_layers


def _gemma2_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """Every other layer has a window, the first one too."""
    layers = [LayerConfig(read_rope(fields, head_dim))] * n_layers
    window = fields.window("sliding_window", 4096)
    return _with_windows(fields, layers, window, [(index + 1) % 2 != 0 for index in range(n_layers)])


def _gemma3_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """Layers with a window have a rope of their own, which is never scaled with the model's length."""
    pattern = max(fields.integer("sliding_window_pattern", default=6), 1)
    window = fields.window("sliding_window", 4096)
    is_sliding = [(index + 1) % pattern != 0 for index in range(n_layers)]
    wide, local = _gemma3_ropes(fields, head_dim)
    layers = _with_windows(fields, [LayerConfig(wide)] * n_layers, window, is_sliding)
    return tuple(layer if layer.window is None else LayerConfig(local, layer.window) for layer in layers)


def _gemma3_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that see everything, and of those that do not."""
    if not fields.has("rope_parameters"):
        local = RopeConfig("default", fields.number("rope_local_base_freq", default=10000.0))
        return read_rope(fields, head_dim, theta=1e6), local
    ropes = fields.section("rope_parameters")
    if not ropes.has("full_attention") and not ropes.has("sliding_attention"):
        raise fields.error("rope_parameters", "must have full_attention and sliding_attention")
    wide = read_rope(fields, head_dim, section=ropes.section("full_attention"), theta=1e6)
    return wide, read_rope(fields, head_dim, section=ropes.section("sliding_attention"))


def _mistral_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """One window in all layers, or none in any."""
    window = fields.window("sliding_window", 4096)
    types = _layer_types(fields, n_layers) or ()
    if any(kind != ("full_attention" if window is None else "sliding_attention") for kind in types):
        raise fields.error("layer_types", "must all be alike: this architecture has one window in all layers")
    return (LayerConfig(read_rope(fields, head_dim), window),) * n_layers


def _phi3_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """One window in all layers, or none; its long rope has had three names."""
    rope = read_rope(fields, head_dim, old_names=_PHI3_ROPES, may_be_partial=True, original=4096)
    return (LayerConfig(rope, fields.window("sliding_window")),) * n_layers


def _qwen_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """Windows from layer ``max_window_layers`` on, where they are used at all."""
    window = fields.window("sliding_window", 4096) if fields.flag("use_sliding_window", default=False) else None
    first = fields.integer("max_window_layers", default=28)
    is_sliding = [window is not None and index >= first for index in range(n_layers)]
    return _with_windows(fields, [LayerConfig(read_rope(fields, head_dim))] * n_layers, window, is_sliding)


def _smollm3_layers(fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """Every so many layers q and k are not rotated; windows, where used at all, are in those layers."""
    rope = read_rope(fields, head_dim, theta=2e6)
    interval = fields.integer("no_rope_layer_interval", default=4)
    flags = fields.ids("no_rope_layers") or tuple(int((index + 1) % max(interval, 1) != 0) for index in range(n_layers))
    if len(flags) < n_layers or set(flags) - {0, 1} or interval < 1:
        raise fields.error("no_rope_layers", f"must have {n_layers} entries that are 0 (no rope) or 1")
    window = fields.window("sliding_window") if fields.flag("use_sliding_window", default=False) else None
    layers = [LayerConfig(rope if flag else None) for flag in flags[:n_layers]]
    return _with_windows(fields, layers, window, [window is not None and layer.rope is None for layer in layers])


def _with_windows(
    fields: Fields, layers: Sequence[LayerConfig], window: int | None, is_sliding: Sequence[bool]
) -> tuple[LayerConfig, ...]:
    """Layers with a window where ``layer_types`` says so or, where there are none, where ``is_sliding`` does."""
    types = _layer_types(fields, len(layers))
    if types is not None:
        is_sliding = [kind == "sliding_attention" for kind in types]
    if window is None and any(is_sliding):
        raise fields.error("sliding_window", "is missing")
    return tuple(
        LayerConfig(layer.rope, window if sliding else None) for layer, sliding in zip(layers, is_sliding, strict=True)
    )


def _layer_types(fields: Fields, n_layers: int) -> tuple[str, ...] | None:
    types = fields.texts("layer_types")
    if types is None:
        return None
    if len(types) != n_layers:
        raise fields.error("layer_types", f"must have {n_layers} entries, one a layer")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise fields.error("layer_types", f"{unknown[0]!r} is not supported; known: full_attention, sliding_attention")
    return types


def _gpt2_layers(_fields: Fields, n_layers: int, _head_dim: int) -> tuple[LayerConfig, ...]:
    """Positions are learned and added to the embedding: nothing is rotated."""
    return (LayerConfig(rope=None),) * n_layers


LAYER_READERS: Final[Mapping[str, LayerReader]] = MappingProxyType(
    {
        "Gemma2ForCausalLM": _gemma2_layers,
        "Gemma3ForCausalLM": _gemma3_layers,
        "GPT2LMHeadModel": _gpt2_layers,
        "LlamaForCausalLM": _plain_layers,
        "MistralForCausalLM": _mistral_layers,
        "Olmo2ForCausalLM": _plain_layers,
        "Phi3ForCausalLM": _phi3_layers,
        "Qwen2ForCausalLM": _qwen_layers,
        "Qwen3ForCausalLM": _qwen_layers,
        "SmolLM3ForCausalLM": _smollm3_layers,
    }
)
