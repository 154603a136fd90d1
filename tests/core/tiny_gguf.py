"""GGUF files of tiny models, as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

_ARCHITECTURES: Final = {"mistral": "llama", "gemma3_text": "gemma3"}
_PERMUTED: Final = ("llama", "smollm3")


def write_gguf(model: Any, path: Path, *, tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """A float32 file of the model. ``tensors``: more of them; ``metadata``: more of it, by names of the writer."""
    config = model.config
    arch = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_metadata(config), **metadata}.items():
        getattr(writer, f"add_{key}")(value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(_converted(arch, name, tensor.float().numpy(), config)))
    for name, values in {**_more_tensors(config), **(tensors or {})}.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    if config.model_type == "gpt2":
        return _gpt2_metadata(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
        "token_list": [f"t{i}" for i in range(config.vocab_size)],
        "eos_token_id": config.eos_token_id,
    }
    if config.model_type == "phi3":
        values |= {"rope_dimension_count": int(head_dim * rope["partial_rotary_factor"])}
        values |= {"sliding_window": config.sliding_window or 0}
        values |= {"rope_scaling_orig_ctx_len": config.original_max_position_embeddings}
        if rope["rope_type"] == "longrope":
            limit, original = config.max_position_embeddings, config.original_max_position_embeddings
            values |= {"rope_scaling_attn_factors": np.sqrt(1 + np.log(limit / original) / np.log(original))}
    if config.model_type in ("gemma2", "gemma3_text"):
        values |= {"sliding_window": config.sliding_window}
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name):
                values |= {name: getattr(config, name)}
    if config.model_type == "gemma3_text":
        theta = config.rope_parameters["sliding_attention"]["rope_theta"]
        if (config._sliding_window_pattern, theta) != (6, 10000.0):  # else the file need not say it
            values |= {"sliding_window_pattern": config._sliding_window_pattern, "rope_freq_base_swa": theta}
        if rope["rope_type"] == "linear":
            values |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": rope["factor"]}
    return values


def _gpt2_metadata(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "head_count": config.n_head,
        "layer_norm_eps": config.layer_norm_epsilon,
        "token_list": [f"t{i}" for i in range(config.vocab_size)],
        "eos_token_id": config.eos_token_id,
    }


def _more_tensors(config: Any) -> dict[str, np.ndarray]:
    if config.model_type != "phi3" or config.rope_parameters["rope_type"] != "longrope":
        return {}
    rope = config.rope_parameters
    return {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"]) for name in ("short", "long")}


def _converted(arch: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if arch in _PERMUTED and "q_proj" in name:
        return _permuted(values, config.num_attention_heads)
    if arch in _PERMUTED and "k_proj" in name:
        return _permuted(values, config.num_key_value_heads)
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return values.T
    return values


def _permuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """[head, half, pair] -> [head, pair, half]: llama.cpp rotates neighbours, transformers rotates halves."""
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
