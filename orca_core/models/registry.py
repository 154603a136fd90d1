"""The architectures there is a decoder for, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from orca_core.errors import UnsupportedArchitectureError
from orca_core.models import layout
from orca_core.models.config import NormKind, QkNorm
from orca_core.models.layout import Layout


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a checkpoint's architecture implies beyond its configuration.

    ``name``: as in ``architectures`` of a config.json. ``gguf_name``: ``general.architecture`` of a GGUF file;
    ``None`` = there is none of its own.
    ``gguf_permuted``: llama.cpp's converter reorders the rows of q and k for its own rope. ``aliases``: other words
    that its config.json has for a field. ``qkv_bias``: ``None`` = the configuration's ``attention_bias``. ``biases``:
    every projection has one. The rest as in ``ModelConfig``, or (``default_…``) what holds where the configuration is
    silent; ``default_head_dim`` ``None`` = hidden_size / heads. ``default_query_scalar``: the attention scale is
    query_pre_attn_scalar^-0.5; ``None`` = there is no such field. ``softcaps``: those it has, with their defaults.
    """

    name: str
    gguf_name: str | None
    gguf_permuted: bool = False
    layout: Layout = field(default_factory=Layout)
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    norm: NormKind = "rms"
    qk_norm: QkNorm | None = None
    qkv_bias: bool | None = None
    biases: bool = False
    gated_mlp: bool = True
    learned_positions: bool = False
    scaled_embedding: bool = False
    softcaps: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    default_activation: str = "silu"
    default_head_dim: int | None = None
    default_eps: float = 1e-6
    default_query_scalar: int | None = None
    default_tied: bool = False


_GEMMA2: Final = Architecture(
    "Gemma2ForCausalLM",
    "gemma2",
    layout=layout.GEMMA,
    aliases=MappingProxyType({"hidden_act": "hidden_activation"}),
    norm="rms_wide",
    scaled_embedding=True,
    softcaps=MappingProxyType({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    default_activation="gelu_pytorch_tanh",
    default_head_dim=256,
    default_query_scalar=256,
    default_tied=True,
)
_GPT2: Final = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    layout=layout.GPT2,
    aliases=MappingProxyType(
        {
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        }
    ),
    norm="layer",
    biases=True,
    gated_mlp=False,
    learned_positions=True,
    default_activation="gelu_new",
    default_eps=1e-5,
    default_tied=True,
)
_ALL: Final = (
    _GEMMA2,
    replace(
        _GEMMA2,
        name="Gemma3ForCausalLM",
        gguf_name="gemma3",
        qk_norm="head",
        softcaps=MappingProxyType({"final_logit_softcapping": None}),
    ),
    _GPT2,
    Architecture("LlamaForCausalLM", "llama", gguf_permuted=True),
    # a converted Mistral is a llama to llama.cpp
    Architecture("MistralForCausalLM", None),
    Architecture("Olmo2ForCausalLM", "olmo2", layout=layout.OLMO2, norm="rms_wide", qk_norm="width", default_eps=1e-5),
    Architecture("Phi3ForCausalLM", "phi3", layout=layout.PHI3, default_eps=1e-5),
    Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Architecture("Qwen3ForCausalLM", "qwen3", qk_norm="head", default_head_dim=128),
    Architecture("SmolLM3ForCausalLM", "smollm3", gguf_permuted=True, default_tied=True),
)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {architecture.name: architecture for architecture in _ALL}
GGUF_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    architecture.gguf_name: architecture for architecture in _ALL if architecture.gguf_name is not None
}


def find_architecture(source: str, name: str, known: Mapping[str, Architecture] = ARCHITECTURES) -> Architecture:
    """The architecture of that name. Raises ``UnsupportedArchitectureError``; ``source`` is for its message."""
    if name not in known:
        raise UnsupportedArchitectureError(source, name, tuple(known))
    return known[name]
