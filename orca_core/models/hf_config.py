"""A ``ModelConfig`` from the config.json and generation_config.json of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orca_core.errors import ModelLoadError
from orca_core.models.config import ModelConfig
from orca_core.models.fields import Fields
from orca_core.models.hf_layers import LAYER_READERS
from orca_core.models.registry import Architecture, find_architecture
from orca_core.source import ModelSource

_DTYPES: Final = ("float32", "bfloat16", "float16")

ACTIVATION_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
)
"""What transformers calls an activation -> its name here."""

_MUST_BE: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "use_bidirectional_attention": False,
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    }
)
"""Fields that change the numbers, and the only value there is code for."""


def read_hf_config(source: ModelSource) -> tuple[ModelConfig, Architecture]:
    """The model's configuration. Raises ``ModelLoadError`` and ``UnsupportedArchitectureError``."""
    values = read_json(source.name, source.folder / "config.json")
    architecture = _architecture(source.name, values)
    fields = Fields(source.name, values, aliases=architecture.aliases)
    _refuse_unsupported(source.name, fields)
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=architecture.default_head_dim or hidden_size // max(n_heads, 1))
    attention_bias = fields.flag("attention_bias", default=architecture.biases)
    config = ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", None if architecture.gated_mlp else 4 * hidden_size),
        norm_eps=fields.number("rms_norm_eps", default=architecture.default_eps),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=LAYER_READERS[architecture.name](fields, fields.layer_count("num_hidden_layers"), head_dim),
        norm=architecture.norm,
        qk_norm=architecture.qk_norm,
        activation=_activation(source.name, fields, architecture),
        gated_mlp=architecture.gated_mlp,
        learned_positions=architecture.learned_positions,
        embedding_scale=hidden_size**0.5 if architecture.scaled_embedding else None,
        attention_scale=_attention_scale(fields, architecture),
        attention_softcap=_softcap(fields, architecture, "attn_logit_softcapping"),
        logit_softcap=_softcap(fields, architecture, "final_logit_softcapping"),
        tied_head=fields.flag("tie_word_embeddings", default=architecture.default_tied),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=attention_bias,
        # where the architecture has no such field a checkpoint has no such tensors either
        mlp_bias=fields.flag("mlp_bias", default=architecture.biases),
        eos_ids=_eos_ids(source, fields),
        dtype=_dtype(fields),
    )
    config.check(source.name)
    return config, architecture


def read_json(source: str, file: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ``ModelLoadError``; ``source`` is for its message."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadError(source, f"cannot read {file.name}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(source, f"{file.name} is not valid JSON: {error}") from error
    except RecursionError:
        raise ModelLoadError(source, f"{file.name} is nested too deeply") from None
    if not isinstance(values, dict):
        raise ModelLoadError(source, f"{file.name} is not a JSON object")
    return values


def _architecture(source: str, values: dict[str, object]) -> Architecture:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(source, "configuration: architectures must name one model class")
    return find_architecture(source, names[0])


def _refuse_unsupported(source: str, fields: Fields) -> None:
    """Whatever would give wrong numbers if it were silently ignored."""
    if fields.has("quantization_config"):
        raise ModelLoadError(source, "quantised safetensors are not supported; use the original weights or a GGUF file")
    for name, value in _MUST_BE.items():
        if fields.flag(name, default=value) != value:
            raise fields.error(name, f"must be {str(value).lower()}: there is no code for the other")


def _activation(source: str, fields: Fields, architecture: Architecture) -> str:
    name = fields.text("hidden_act", default=architecture.default_activation)
    if name not in ACTIVATION_NAMES:
        raise ModelLoadError(source, f"activation {name!r} is not supported; known: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def _attention_scale(fields: Fields, architecture: Architecture) -> float | None:
    name = "query_pre_attn_scalar"
    if architecture.default_query_scalar is None:
        return None
    scalar = fields.number(name, default=architecture.default_query_scalar)
    if not scalar > 0:
        raise fields.error(name, "must be above 0")
    return float(scalar**-0.5)


def _softcap(fields: Fields, architecture: Architecture, name: str) -> float | None:
    if name in architecture.softcaps:
        return fields.optional_number(name, architecture.softcaps[name])
    if fields.has(name):
        raise fields.error(name, "must be null: this architecture has no such cap")
    return None


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
