"""Tiny random checkpoints of every family and variant there is a decoder for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import transformers

from tests.core.tiny_models import ROPES, SHARED, randomised, tiny_llama, tiny_qwen3


def tiny_qwen2(**changes: Any) -> transformers.Qwen2ForCausalLM:
    """q, k and v have biases, the output has none."""
    options = {**SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPES["default"]}
    return randomised(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**options, **changes})))


def tiny_mistral(**changes: Any) -> transformers.MistralForCausalLM:
    """Every layer sees the last 16 positions."""
    options = {
        **SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16,
        "rope_parameters": ROPES["default"],
    }  # fmt: skip
    return randomised(transformers.MistralForCausalLM(transformers.MistralConfig(**{**options, **changes})))


def tiny_smollm3(**changes: Any) -> transformers.SmolLM3ForCausalLM:
    """Five layers, the fourth of which does not rotate q and k."""
    options = {
        **SHARED, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        "rope_parameters": ROPES["default"],
    }  # fmt: skip
    return randomised(transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**options, **changes})))


def longrope(original: int, n_divisors: int, **more: Any) -> dict[str, Any]:
    """A rope of two sets of divisors. At 256 positions the factor is 256 / original."""
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * i for i in range(n_divisors)],
        "long_factor": [1.0 + 0.9 * i for i in range(n_divisors)], **more,
    }  # fmt: skip


def tiny_phi3(**changes: Any) -> transformers.Phi3ForCausalLM:
    """q, k, v in one tensor, gate and up in another; heads of 12."""
    options = {
        **SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        "rope_parameters": ROPES["default"], "original_max_position_embeddings": 256,
    }  # fmt: skip
    return randomised(transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**options, **changes})))


def tiny_olmo2(**changes: Any) -> transformers.Olmo2ForCausalLM:
    """Norms behind attention and MLP; q and k are normalised over all of their heads together."""
    options = {
        **SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        "rope_parameters": ROPES["default"],
    }  # fmt: skip
    return randomised(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**{**options, **changes})))


_GEMMA: Final[dict[str, Any]] = {
    **SHARED, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "query_pre_attn_scalar": 16, "sliding_window": 16, "pad_token_id": 0,
}  # fmt: skip


def tiny_gemma2(**changes: Any) -> transformers.Gemma2ForCausalLM:
    """Caps low enough to bend most scores and logits."""
    options = {
        **_GEMMA, "rope_parameters": ROPES["default"], "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0,
    }  # fmt: skip
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**options, **changes}))
    return randomised(model, norm_mean=0.0)


def tiny_gemma3(**changes: Any) -> transformers.Gemma3ForCausalLM:
    """Two layers with a window and their own rope to one without."""
    options = {**_GEMMA, "rope_parameters": gemma3_ropes(), "sliding_window_pattern": 3}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**options, **changes}))
    return randomised(model, norm_mean=0.0)


def tiny_gpt2(**changes: Any) -> transformers.GPT2LMHeadModel:
    """4 heads of 12, learned positions, biases everywhere."""
    options = {
        "vocab_size": 96, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 256, "bos_token_id": None,
        "eos_token_id": 2,
    }  # fmt: skip
    return randomised(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**options, **changes})))


def gemma3_ropes(**full: Any) -> dict[str, Any]:
    """Ropes of the two kinds of layers."""
    return {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }


VARIANTS: Final[dict[str, Callable[[], Any]]] = {
    "llama-default": tiny_llama,
    "llama-linear": lambda: tiny_llama(rope_parameters=ROPES["linear"]),
    "llama-llama3": lambda: tiny_llama(rope_parameters=ROPES["llama3"]),
    "llama-yarn": lambda: tiny_llama(rope_parameters=ROPES["yarn"]),
    "llama-yarn-mscale": lambda: tiny_llama(
        rope_parameters={**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    ),
    "llama-dynamic": lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    "llama-tied": lambda: tiny_llama(tie_word_embeddings=True),
    "llama-biases": lambda: tiny_llama(attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": lambda: tiny_llama(num_key_value_heads=1),
    "llama-no-sharing": lambda: tiny_llama(num_key_value_heads=4),
    "llama-head-dim": lambda: tiny_llama(head_dim=20),
    "qwen3": tiny_qwen3,
    "qwen3-tied": lambda: tiny_qwen3(tie_word_embeddings=True),
    "qwen3-bias": lambda: tiny_qwen3(attention_bias=True),
    "qwen3-yarn": lambda: tiny_qwen3(rope_parameters=ROPES["yarn"]),
    "qwen2": tiny_qwen2,
    "qwen2-tied-yarn": lambda: tiny_qwen2(tie_word_embeddings=True, rope_parameters=ROPES["yarn"]),
    "qwen2-windows": lambda: tiny_qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "mistral": tiny_mistral,
    "mistral-no-window": lambda: tiny_mistral(sliding_window=None, head_dim=16),
    "mistral-two-positions": lambda: tiny_mistral(sliding_window=2),
    "mistral-yarn": lambda: tiny_mistral(rope_parameters=ROPES["yarn"]),
    "phi3": tiny_phi3,
    "phi3-window": lambda: tiny_phi3(sliding_window=16),
    "phi3-partial": lambda: tiny_phi3(rope_parameters={**ROPES["default"], "partial_rotary_factor": 0.67}),
    "phi3-longrope-short": lambda: tiny_phi3(rope_parameters=longrope(256, 6, factor=4.0)),
    "gemma2": tiny_gemma2,
    "gemma2-untied-no-caps": lambda: tiny_gemma2(
        tie_word_embeddings=False, attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=40
    ),
    "gemma2-linear": lambda: tiny_gemma2(rope_parameters=ROPES["linear"]),
    "gemma3": tiny_gemma3,
    "gemma3-linear": lambda: tiny_gemma3(rope_parameters=gemma3_ropes(rope_type="linear", factor=4.0)),
    "gemma3-cap": lambda: tiny_gemma3(final_logit_softcapping=5.0, query_pre_attn_scalar=24, attention_bias=True),
    "gpt2": tiny_gpt2,
    "gpt2-inner-untied": lambda: tiny_gpt2(
        n_inner=80, activation_function="gelu_pytorch_tanh", tie_word_embeddings=False
    ),
    "olmo2": tiny_olmo2,
    "olmo2-biases-tied": lambda: tiny_olmo2(attention_bias=True, tie_word_embeddings=True),
    "olmo2-yarn": lambda: tiny_olmo2(rope_parameters=ROPES["yarn"], num_key_value_heads=4),
    "smollm3": tiny_smollm3,
    "smollm3-windows": lambda: tiny_smollm3(
        no_rope_layers=[0, 1, 0, 1, 1], use_sliding_window=True, sliding_window=16, tie_word_embeddings=False
    ),
    "smollm3-yarn": lambda: tiny_smollm3(rope_parameters=ROPES["yarn"]),
}
