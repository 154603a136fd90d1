"""How a checkpoint keeps the weights of a family: under which names, and in which form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of modules, as transformers has them, each with a ``weight`` and maybe a ``bias``. ``None`` = not there.

    ``prefix``: before every name but the head's. ``layers``: before the number of a layer. Where ``qkv`` or ``gate_up``
    has one name only, the checkpoint keeps them stacked as the decoder does. ``transposed``: projections are kept as
    ``[in, out]``. ``norm_offset``: what is added to the weight of a norm. ``derived``: ends of the names of buffers
    that old files carry and that follow from the configuration.
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    transposed: bool = False
    norm_offset: float = 0.0
    derived: tuple[str, ...] = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")

    def layer(self, index: int) -> str:
        """What the names of one layer's modules begin with."""
        return f"{self.prefix}{self.layers}.{index}."


GEMMA: Final = Layout(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
GPT2: Final = Layout(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h",
    norm="ln_f",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    derived=(".attn.bias", ".attn.masked_bias"),
)
OLMO2: Final = Layout(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
PHI3: Final = Layout(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
