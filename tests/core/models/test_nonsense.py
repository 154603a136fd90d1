"""Numbers no model has: whatever a configuration says, it is refused or it means what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from orca_core.attention.cpu import c_spec
from orca_core.config import EngineConfig
from orca_core.errors import ConfigError, ModelLoadError
from orca_core.models.decoder import Decoder
from orca_core.models.hf_config import read_hf_config
from orca_core.models.rope import rope_frequencies
from orca_core.source import ModelSource
from tests.core import tiny_families
from tests.core.tiny_models import load, tiny_llama

NONSENSE: tuple[object, ...] = (
    10**400, -(10**400), 2**63, 2**32 + 1, -1, 0, 1e308, 1e-320, [], {}, "1", True, None,
)  # fmt: skip
WINDOWS = (4096, 2**31, 2**32 + 1)
READ = ("hidden_size", "intermediate", "num_", "n_", "max_", "vocab", "rms", "layer_norm", "attn_", "final_", "sliding",
        "query", "eos", "rope", "layer_types", "dtype")  # fmt: skip
ROPES: tuple[dict[str, object], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.0, "mscale": 1.0},
)  # fmt: skip


def folder_of(values: dict[str, Any], folder: Path) -> ModelSource:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelSource(str(folder), "safetensors", folder)


def read_or_refuse(values: dict[str, Any], folder: Path) -> None:
    """Anything but ``ModelLoadError`` is a failure, as are sizes and scales that a kernel's fields do not hold."""
    try:
        config, _ = read_hf_config(folder_of(values, folder))
        for rope in {layer.rope for layer in config.layers if layer.rope is not None}:
            rope_frequencies(config, rope)
    except ModelLoadError:
        return
    for layer in config.layers:
        window = layer.window
        assert window is None or 1 <= window < 2**31
    for size in (
        config.n_heads,
        config.head_dim,
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings,
    ):
        assert 1 <= size < 2**31
    scales = (config.norm_eps, config.attention_softcap, config.logit_softcap, config.embedding_scale)
    for scale in (*scales, config.attention_scale):
        assert scale is None or 0 < float(torch.tensor(scale, dtype=torch.float32)) < torch.inf


@pytest.mark.parametrize(
    "maker", ["tiny_mistral", "tiny_gemma2", "tiny_gemma3", "tiny_phi3", "tiny_gpt2", "tiny_llama"]
)
def test_a_field_of_nonsense(maker: str, tmp_path: Path) -> None:
    make: Callable[..., PreTrainedModel] = getattr(tiny_families, maker, tiny_llama)
    model = make()
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    assert read_hf_config(folder_of(values, tmp_path))
    for rope in ROPES:
        for name in rope:
            for nonsense in NONSENSE:
                read_or_refuse({**values, "rope_parameters": None, "rope_scaling": {**rope, name: nonsense}}, tmp_path)
    numbers = [name for name in values if name.startswith(READ)]
    assert len(numbers) > 5
    for name in (*numbers, "partial_rotary_factor", "head_dim", "query_pre_attn_scalar", "no_rope_layer_interval"):
        for nonsense in NONSENSE:
            read_or_refuse({**values, name: nonsense}, tmp_path)


def test_a_window_above_every_length_is_that_window(tmp_path: Path) -> None:
    """4294967297 in a field of 32 bits is 1."""
    tiny_families.tiny_mistral().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for window in WINDOWS:
        folder_of({**values, "sliding_window": window}, tmp_path)
        decoder = load(tmp_path)
        assert isinstance(decoder, Decoder)
        assert {c_spec(spec).window for spec in decoder.attention_specs} == {min(window, 2**31 - 1)}


def test_a_window_that_was_put_there_by_hand_is_refused(tmp_path: Path) -> None:
    config, _ = read_hf_config(
        folder_of(tiny_llama().config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, tmp_path)
    )
    for window in (0, -1, 2**31, 2**32 + 1):
        with pytest.raises(ModelLoadError, match="window"):
            replace(config, layers=(replace(config.layers[0], window=window),)).check("here")


def test_json_that_is_nested_without_end(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("[" * 200_000)
    with pytest.raises(ModelLoadError, match=r"generation_config.json is (nested too deeply|not valid JSON)"):
        load(tmp_path)


def test_a_number_of_too_many_digits_to_read(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {"9" * 5000}}}')
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "\x00", "\ud800", "x/../../y", "", "."])
def test_an_index_that_names_what_no_file_is_called(name: str, tmp_path: Path) -> None:
    values = tiny_llama().config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    folder_of(values, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="which is not in the folder"):
        load(tmp_path)


@pytest.mark.parametrize("field", ["threads", "block_size", "n_slots", "max_model_len", "max_batch_tokens",
                                   "max_kv_bytes", "max_waiting_slots", "max_batch_size"])  # fmt: skip
def test_limits_of_an_engine_that_no_machine_has(field: str) -> None:
    for value in (2**61, 10**400):
        with pytest.raises(ConfigError, match=f"{field}: must be at most"):
            EngineConfig(**{field: value})
