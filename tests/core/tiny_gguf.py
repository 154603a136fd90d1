"""GGUF files of tiny models, as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(model: Any, path: Path, *, rope_freqs: np.ndarray | None = None, **metadata: Any) -> Path:
    """A GGUF file of the model as llama.cpp's converter lays it out: float32, q and k of llama permuted."""
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.float().numpy()
        if arch in ("llama", "smollm3") and "q_proj" in name:
            values = _permuted(values, config.num_attention_heads)
        if arch in ("llama", "smollm3") and "k_proj" in name:
            values = _permuted(values, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(values))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """[head, half, pair] -> [head, pair, half]: llama.cpp rotates neighbours, transformers rotates halves."""
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
