"""Weights and configuration from a GGUF file, read and dequantised by the ``gguf`` library.

GGUF names and metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import torch

from orca_core.errors import ModelLoadError
from orca_core.models.config import Fields, ModelConfig, RopeConfig
from orca_core.models.registry import GGUF_ARCHITECTURES, Architecture, find_architecture
from orca_core.source import ModelSource

_TOP_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_LAYER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS: Final = "rope_freqs.weight"
_EOS_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_ROPE_VARIANTS: Final[Mapping[str, str]] = MappingProxyType({"none": "default", "linear": "linear", "yarn": "yarn"})
_LONG_LISTS: Final = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


class GgufCheckpoint:
    """A ``Checkpoint`` over a memory-mapped GGUF file; tensors are dequantised one at a time, to float32.

    Raises ``ModelLoadError`` and ``UnsupportedArchitectureError``.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source.name
        if source.gguf_file is None:
            raise ModelLoadError(source.name, "not a GGUF source")
        try:
            reader: Any = gguf.GGUFReader(source.gguf_file)
            self._values = {key: field.contents() for key, field in reader.fields.items() if key not in _LONG_LISTS}
        except Exception as error:  # the library raises whatever a damaged file makes it stumble over
            raise ModelLoadError(source.name, f"cannot read {source.gguf_file.name}: {error}") from error
        self._tensors: dict[str, Any] = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._rope_divisors = self._tensors.pop(_ROPE_DIVISORS, None)
        name = Fields(self._source, self._values).text("general.architecture")
        self._architecture = find_architecture(self._source, name, GGUF_ARCHITECTURES)
        self._config = self._read_config(self._architecture)

    def config(self) -> ModelConfig:
        """The model's configuration, from the file's metadata and from which tensors it has."""
        return self._config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint``."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def stored_dtype(self) -> str:
        """bfloat16: what a quantised file is worth, at half of float32's traffic."""
        return "bfloat16"

    def load(self, name: str) -> torch.Tensor:
        """See ``Checkpoint``."""
        values = self._dequantised(name, self._tensors[name])
        heads = {"q_proj": self._config.n_heads, "k_proj": self._config.n_kv_heads}
        projection = name.split(".")[-2]
        if self._architecture.gguf_permuted and projection in heads:
            values = _unpermuted(values, heads[projection])
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def _dequantised(self, name: str, tensor: Any) -> np.ndarray:
        try:
            values: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:  # NotImplementedError for a type it cannot dequantise, ValueError for damaged data
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ModelLoadError(self._source, f"cannot dequantise {name} of type {kind}: {error}") from error
        return values.astype(np.float32, copy=False).reshape(_shape(tensor))

    def _read_config(self, architecture: Architecture) -> ModelConfig:
        fields = Fields(self._source, self._values, prefix=f"{architecture.gguf_name}.")
        self._refuse_unsupported(fields)
        hidden_size, n_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
        head_dim = fields.integer("attention.key_length", default=hidden_size // max(n_heads, 1))
        if fields.integer("rope.dimension_count", default=head_dim) != head_dim:
            raise fields.error(
                "rope.dimension_count", f"must be the head size {head_dim}; only whole heads are rotated"
            )
        if fields.integer("attention.value_length", default=head_dim) != head_dim:
            raise fields.error("attention.value_length", f"must be the head size {head_dim}")
        eos_ids = [i for key in _EOS_KEYS for i in Fields(self._source, self._values).ids(key)]
        config = ModelConfig(
            architecture=architecture.name,
            # the embedding says it, and unlike the metadata it always does
            vocab_size=self._rows("model.embed_tokens.weight"),
            hidden_size=hidden_size,
            n_layers=fields.integer("block_count"),
            n_heads=n_heads,
            n_kv_heads=fields.integer("attention.head_count_kv", default=n_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=fields.integer("context_length"),
            rope=self._rope(fields),
            tied_head="lm_head.weight" not in self._tensors,
            qk_norm=architecture.qk_norm,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.up_proj.bias" in self._tensors,
            eos_ids=tuple(dict.fromkeys(eos_ids)),
        )
        config.check(self._source)
        return config

    def _refuse_unsupported(self, fields: Fields) -> None:
        """Whatever would give wrong numbers if it were silently ignored."""
        if fields.integer("expert_count", default=0):
            raise ModelLoadError(self._source, "mixtures of experts are not supported")
        if fields.has("attention.sliding_window"):
            raise ModelLoadError(self._source, "sliding window attention is not supported")
        if Fields(self._source, self._values).integer("split.count", default=1) > 1:
            raise ModelLoadError(self._source, "GGUF files split in parts are not supported; merge them first")

    def _rope(self, fields: Fields) -> RopeConfig:
        theta = fields.number("rope.freq_base", default=10000.0)
        if self._rope_divisors is not None:
            divisors = self._dequantised(_ROPE_DIVISORS, self._rope_divisors).flatten().tolist()
            return RopeConfig("divided", theta, divisors=tuple(divisors))
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

    def _rows(self, name: str) -> int:
        if name not in self._tensors:
            raise ModelLoadError(self._source, f"missing tensors: {name}")
        return _shape(self._tensors[name])[0]


def _hf_name(name: str) -> str:
    """The name transformers uses for a tensor; the name itself where there is no such rule."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF writes the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _unpermuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo the converter's reordering: within a head it puts the two halves that rope pairs next to each other."""
    pairs = values.reshape(n_heads, values.shape[0] // n_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
