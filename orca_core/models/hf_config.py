"""A ``ModelConfig`` from the config.json and generation_config.json of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from orca_core.errors import ModelLoadError
from orca_core.models.config import Fields, ModelConfig, RopeConfig
from orca_core.models.registry import Architecture, find_architecture
from orca_core.source import ModelSource

_DTYPES: Final = ("float32", "bfloat16", "float16")


def read_hf_config(source: ModelSource) -> ModelConfig:
    """The model's configuration. Raises ``ModelLoadError`` and ``UnsupportedArchitectureError``.

    Understands ``rope_parameters`` (transformers 5) and ``rope_theta`` + ``rope_scaling`` (before).
    """
    values = read_json(source.name, source.folder / "config.json")
    fields = Fields(source.name, values)
    architecture = _architecture(source.name, values)
    _refuse_unsupported(source.name, values, fields)
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = architecture.default_head_dim or hidden_size // max(n_heads, 1)
    attention_bias = fields.flag("attention_bias", default=False)
    config = ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        n_layers=fields.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
        head_dim=fields.integer("head_dim", default=head_dim),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=_rope(fields),
        tied_head=fields.flag("tie_word_embeddings", default=False),
        qk_norm=architecture.qk_norm,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        # a Qwen3 checkpoint has no such field, and no such tensors either
        mlp_bias=fields.flag("mlp_bias", default=False),
        eos_ids=_eos_ids(source, fields),
        dtype=_dtype(fields),
    )
    config.check(source.name)
    return config


def read_json(source: str, file: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ``ModelLoadError``; ``source`` is for its message."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadError(source, f"cannot read {file.name}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(source, f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(source, f"{file.name} is not a JSON object")
    return values


def _architecture(source: str, values: dict[str, object]) -> Architecture:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(source, "configuration: architectures must name one model class")
    return find_architecture(source, names[0])


def _refuse_unsupported(source: str, values: dict[str, object], fields: Fields) -> None:
    """Whatever would give wrong numbers if it were silently ignored."""
    if values.get("quantization_config") is not None:
        raise ModelLoadError(source, "quantised safetensors are not supported; use the original weights or a GGUF file")
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise ModelLoadError(source, f"activation {activation!r} is not supported; known: silu")
    layer_types = values.get("layer_types")
    sliding = isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types)
    if sliding or fields.flag("use_sliding_window", default=False):
        raise ModelLoadError(source, "sliding window attention is not supported")


def _rope(fields: Fields) -> RopeConfig:
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    partial = rope.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    if partial != 1.0:
        raise fields.error("partial_rotary_factor", f"{partial} is not supported; only whole heads are rotated")
    variant = rope.text("rope_type", default=rope.text("type", default="default"))
    limit = fields.integer("max_position_embeddings")
    # a value beside rope_scaling wins over one in it, and the model's limit stands in for both, as in transformers
    original = rope.integer("original_max_position_embeddings", default=limit)
    original = fields.integer("original_max_position_embeddings", default=original)
    scaled = variant in ("linear", "llama3", "yarn")
    fallback = limit / original if variant == "yarn" and original > 0 else None
    return RopeConfig(
        variant=variant,
        theta=rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0)),
        factor=rope.number("factor", default=fallback) if scaled else 1.0,
        low_freq_factor=rope.number("low_freq_factor") if variant == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if variant == "llama3" else 4.0,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )


def _eos_ids(source: ModelSource, fields: Fields) -> tuple[int, ...]:
    file = source.folder / "generation_config.json"
    ids: tuple[int, ...] = ()
    if file.is_file():
        ids = Fields(source.name, read_json(source.name, file)).ids("eos_token_id")
    return ids or fields.ids("eos_token_id")


def _dtype(fields: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            dtype = fields.text(name)
            if dtype not in _DTYPES:
                raise fields.error(name, f"{dtype!r} is not supported; known: {', '.join(_DTYPES)}")
            return dtype
    return None
