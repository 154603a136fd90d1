"""A ``ModelConfig`` from the metadata of a GGUF file, and from which tensors it has.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp has in its code instead of the file
(which layers have windows, which have no rope) is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orca_core.errors import ModelLoadError
from orca_core.models.config import LayerConfig, ModelConfig, RopeConfig
from orca_core.models.fields import Fields
from orca_core.models.hf_config import ACTIVATION_NAMES
from orca_core.models.registry import Architecture

_EOS_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
DIVISORS: Final[tuple[str, ...]] = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LAYERS_OF_27B: Final[Mapping[str, int]] = MappingProxyType({"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62})
_ROPE_EXTRAS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
    }
)
"""Fields that change a rope, and the values with which they don't."""
_ROPE_VARIANTS: Final[Mapping[str, str]] = MappingProxyType({"none": "default", "linear": "linear", "yarn": "yarn"})


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a GGUF file says. ``shapes``: of every tensor by its GGUF name, slowest dimension first.

    ``divisors``: of the rope's frequencies, those that the file has of ``DIVISORS``.
    """

    source: str
    values: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    divisors: Mapping[str, tuple[float, ...]]


def read_gguf_config(facts: GgufFacts, architecture: Architecture) -> ModelConfig:
    """The model's configuration. Raises ``ModelLoadError``."""
    top, fields = Fields(facts.source, facts.values), Fields(facts.source, facts.values, f"{architecture.gguf_name}.")
    _refuse_unsupported(facts.source, top, fields)
    hidden_size, n_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", default=hidden_size // max(n_heads, 1))
    if fields.integer("attention.value_length", default=head_dim) != head_dim:
        raise fields.error("attention.value_length", f"must be the head size {head_dim}")
    if "token_embd.weight" not in facts.shapes:
        raise ModelLoadError(facts.source, "missing tensors: token_embd.weight")
    config = ModelConfig(
        architecture=architecture.name,
        # the embedding says it, and unlike the metadata it always does
        vocab_size=facts.shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", default=n_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        norm_eps=fields.number(f"attention.layer_norm_{'' if architecture.norm == 'layer' else 'rms_'}epsilon"),
        max_position_embeddings=fields.integer("context_length"),
        layers=_LAYERS[architecture.name](facts, fields, fields.layer_count("block_count"), head_dim),
        norm=architecture.norm,
        qk_norm=architecture.qk_norm,
        activation=ACTIVATION_NAMES[architecture.default_activation],
        gated_mlp=architecture.gated_mlp,
        learned_positions=architecture.learned_positions,
        embedding_scale=hidden_size**0.5 if architecture.scaled_embedding else None,
        attention_scale=_attention_scale(architecture, fields.layer_count("block_count"), hidden_size, n_heads),
        attention_softcap=_softcap(fields, architecture, "attn_logit_softcapping"),
        logit_softcap=_softcap(fields, architecture, "final_logit_softcapping"),
        tied_head="output.weight" not in facts.shapes,
        qkv_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & facts.shapes.keys()),
        output_bias="blk.0.attn_output.bias" in facts.shapes,
        mlp_bias="blk.0.ffn_up.bias" in facts.shapes,
        eos_ids=tuple(dict.fromkeys(i for key in _EOS_KEYS for i in top.ids(key))),
    )
    config.check(facts.source)
    return config


def _refuse_unsupported(source: str, top: Fields, fields: Fields) -> None:
    """Whatever would give wrong numbers if it were silently ignored."""
    if fields.integer("expert_count", default=0):
        raise ModelLoadError(source, "mixtures of experts are not supported")
    if top.integer("split.count", default=1) > 1:
        raise ModelLoadError(source, "GGUF files split in parts are not supported; merge them first")


def _attention_scale(architecture: Architecture, n_layers: int, hidden_size: int, n_heads: int) -> float | None:
    """No file says query_pre_attn_scalar: the head size but in the 27B models, known by how many layers they have."""
    is_27b = _LAYERS_OF_27B.get(architecture.name) == n_layers
    return float((hidden_size / n_heads) ** -0.5) if is_27b else None


def _softcap(fields: Fields, architecture: Architecture, name: str) -> float | None:
    return fields.optional_number(name, architecture.softcaps[name]) if name in architecture.softcaps else None


def _rope(facts: GgufFacts, fields: Fields, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", default=10000.0)
    if fields.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise fields.error("rope.dimension_count", f"must be the head size {head_dim}; only whole heads are rotated")
    for name, plain_value in _ROPE_EXTRAS.items():
        if fields.number(name, default=plain_value) != plain_value:
            raise fields.error(name, "is not supported for this architecture")
    plain, short, long = (facts.divisors.get(name) for name in DIVISORS)
    if short is not None or long is not None:
        raise ModelLoadError(facts.source, "rope of two sets is not supported for this architecture")
    if plain is not None:
        return RopeConfig("divided", theta, divisors=plain)
    scaling = fields.text("rope.scaling.type", default="none")
    if fields.has("rope.scale_linear") and scaling == "none":
        return RopeConfig("linear", theta, fields.number("rope.scale_linear"))
    variant = _ROPE_VARIANTS.get(scaling, scaling)
    limit = fields.integer("context_length")
    return RopeConfig(
        variant=variant,
        theta=theta,
        factor=1.0 if variant == "default" else fields.number("rope.scaling.factor"),
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", default=limit),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
    )


def _plain_layers(facts: GgufFacts, fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """All alike, and none has a window."""
    if fields.has("attention.sliding_window"):
        raise fields.error("attention.sliding_window", "is not supported for this architecture")
    return (LayerConfig(_rope(facts, fields, head_dim)),) * n_layers


def _gemma2_layers(facts: GgufFacts, fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """Every other layer has a window, the first one too."""
    rope, window = _rope(facts, fields, head_dim), fields.window("attention.sliding_window", 4096)
    return tuple(LayerConfig(rope, window if index % 2 == 0 else None) for index in range(n_layers))


def _gemma3_layers(facts: GgufFacts, fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """All but every sixth layer have a window, if the file has one, and a rope that is not scaled."""
    window, pattern = fields.window("attention.sliding_window"), 6
    if fields.has("attention.sliding_window_pattern"):
        pattern = max(fields.integer("attention.sliding_window_pattern"), 1)
    wide = LayerConfig(_rope(facts, fields, head_dim))
    local = LayerConfig(RopeConfig("default", fields.number("rope.freq_base_swa", default=10000.0)), window)
    return tuple(wide if window is None or (i + 1) % pattern == 0 else local for i in range(n_layers))


def _gpt2_layers(_facts: GgufFacts, _fields: Fields, n_layers: int, _head_dim: int) -> tuple[LayerConfig, ...]:
    """Positions are learned and added to the embedding: nothing is rotated."""
    return (LayerConfig(rope=None),) * n_layers


def _phi3_layers(facts: GgufFacts, fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """One window in all layers; 0 = none. A rope of two sets where the file has them."""
    theta, dim = fields.number("rope.freq_base", default=10000.0), fields.integer("rope.dimension_count", head_dim)
    plain, short, long = (facts.divisors.get(name) for name in DIVISORS)
    scaling = fields.text("rope.scaling.type", default="none")
    if plain is not None or scaling not in ("none", "longrope") or (short is None) != (long is None):
        raise ModelLoadError(facts.source, f"rope scaling {scaling!r} is not supported for this architecture")
    rope = RopeConfig("default", theta, dim=dim)
    if short is not None and long is not None:
        limit = fields.integer("context_length")
        original = fields.integer("rope.scaling.original_context_length")
        factor = limit / max(original, 1)
        attention_factor = fields.optional_number("rope.scaling.attn_factor")
        rope = RopeConfig(
            "longrope", theta, factor, dim, original_max_position_embeddings=original,
            attention_factor=attention_factor, divisors=short, long_divisors=long,
        )  # fmt: skip
    window = fields.window("attention.sliding_window") or None
    return (LayerConfig(rope, window),) * n_layers


def _smollm3_layers(facts: GgufFacts, fields: Fields, n_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """No file says which layers have no rope: every fourth one."""
    layers = _plain_layers(facts, fields, n_layers, head_dim)
    return tuple(LayerConfig(None) if (index + 1) % 4 == 0 else layer for index, layer in enumerate(layers))


_LAYERS: Final[Mapping[str, Callable[[GgufFacts, Fields, int, int], tuple[LayerConfig, ...]]]] = MappingProxyType(
    {
        "Gemma2ForCausalLM": _gemma2_layers,
        "Gemma3ForCausalLM": _gemma3_layers,
        "GPT2LMHeadModel": _gpt2_layers,
        "LlamaForCausalLM": _plain_layers,
        "Olmo2ForCausalLM": _plain_layers,
        "Phi3ForCausalLM": _phi3_layers,
        "Qwen2ForCausalLM": _plain_layers,
        "Qwen3ForCausalLM": _plain_layers,
        "SmolLM3ForCausalLM": _smollm3_layers,
    }
)
