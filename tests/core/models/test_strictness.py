"""What is not exactly right is refused, with a message that says what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_core.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from orca_core.models import load_model
from orca_core.models.loading import cpu_has_bfloat16
from orca_core.source import resolve_source
from tests.core.tiny_models import load, tiny_llama, tiny_qwen3

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert caught.value.source == str(folder)
    return caught.value.reason


def test_missing_and_left_over_tensors_are_all_named(folder: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)

    change_tensors(folder, change)
    assert refusal(folder) == (
        "missing tensors: lm_head.weight, model.norm.weight; "
        "unexpected tensors: model.layers.0.self_attn.q_proj.bias, model.layers.3.mlp.up_proj.weight"
    )


def test_long_lists_are_cut(folder: Path) -> None:
    change_config(folder, num_hidden_layers=12)
    reason = refusal(folder)
    assert reason.endswith("and 73 more")
    assert len(reason) < 600


def test_fewer_layers_than_the_file_has(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    assert "unexpected tensors: model.layers.2." in refusal(folder)


def test_a_wrong_shape(folder: Path) -> None:
    change_config(folder, num_key_value_heads=4)
    assert "wrong shapes: model.layers.0.self_attn.k_proj.weight is [24, 48], not [48, 48]" in refusal(folder)


def test_known_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)

    def change(tensors: Tensors) -> None:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = torch.zeros(96, 48)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    before = load(tmp_path).n_parameters
    change_tensors(tmp_path, change)
    assert load(tmp_path).n_parameters == before


def test_an_integer_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    assert "model.norm.weight has dtype I8" in refusal(folder)


def test_pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "never loaded" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b'{"a": 1}'])
def test_a_damaged_safetensors_file(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "cannot read model.safetensors" in refusal(folder)


def test_a_truncated_safetensors_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot read model.safetensors" in refusal(folder)


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], ["GPTJForCausalLM"]])
def test_an_unknown_architecture(names: list[str], folder: Path) -> None:
    change_config(folder, architectures=names)
    with pytest.raises(UnsupportedArchitectureError) as caught:
        load(folder)
    assert caught.value.architecture == names[0]
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(caught.value.known)
    assert "LlamaForCausalLM" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_config_that_is_no_json_object(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json is not" in refusal(folder)


@pytest.mark.parametrize(("changes", "named"), [
    ({"architectures": None}, "architectures"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "48"}, "hidden_size must be an integer"),
    ({"hidden_size": 48.0}, "hidden_size must be an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 4096"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be from 1 to 4096"),
    ({"num_attention_heads": 0}, "n_heads must be at least 1"),
    ({"num_attention_heads": -4}, "n_heads must be at least 1"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ({"num_key_value_heads": 0}, "n_kv_heads must be at least 1"),
    ({"head_dim": 11}, "head_dim 11 must be even"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"rms_norm_eps": 0}, "epsilon 0.0 of the norms"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"hidden_act": "gelu"}, "'gelu' is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ({"use_sliding_window": True}, "sliding windows"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding windows"),
    ({"dtype": "float8"}, "'float8' is not supported"),
    ({"rope_parameters": 3}, "rope_parameters must be an object"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope variant 'proportional' is"),
    ({"rope_parameters": {"rope_type": "divided", "rope_theta": 1e4}}, "rope needs 6 divisors"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "above 0"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}}, "low_freq_factor is missing"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "0 < low"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 8}}, "yarn"),
    ({"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8, "original_max_position_embeddings": 64, "beta_fast": 1e-320
    }}, "betas"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
])  # fmt: skip
def test_a_config_with_a_wrong_value(changes: dict[str, Any], named: str, folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, **changes)
    assert named in refusal(folder)


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": [5, 7]}, 2, (5, 7)),
    ({"eos_token_id": 5}, 2, (5,)),
    ({}, [2, 3], (2, 3)),
    (None, 2, (2,)),
    (None, None, ()),
])  # fmt: skip
def test_eos_ids(generation: Any, config: Any, expected: tuple[int, ...], folder: Path) -> None:
    change_config(folder, eos_token_id=config)
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert load(folder).config.eos_ids == expected


@pytest.mark.parametrize(("weight_map", "named"), [
    (None, "no weight_map"),
    ({}, "no weight_map"),
    ({"a": "model-00009.safetensors"}, "'model-00009.safetensors', which is not in the folder"),
    ({"a": "../model.safetensors"}, "'../model.safetensors', which is not in the folder"),
    ({"a": 3}, "'3', which is not in the folder"),
])  # fmt: skip
def test_a_wrong_index(weight_map: Any, named: str, folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "config.json").write_text((folder / "config.json").read_text())
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert named in refusal(inner)


def test_a_shard_that_the_index_does_not_name_is_missed(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="40KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    lost = index["weight_map"]["model.norm.weight"]
    kept = {name: shard for name, shard in index["weight_map"].items() if shard != lost}
    file.write_text(json.dumps({"weight_map": kept}))
    assert "missing tensors: " in refusal(tmp_path)
    assert "model.norm.weight" in refusal(tmp_path)


def test_several_files_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert load(folder).config.n_layers == 3
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert "several safetensors files but no" in refusal(folder)


@pytest.mark.parametrize(("stored", "asked", "with_instructions", "without"), [
    (torch.float32, "auto", torch.float32, torch.float32),
    (torch.bfloat16, "auto", torch.bfloat16, torch.float32),
    (torch.float16, "auto", torch.float32, torch.float32),
    (torch.float32, "bfloat16", torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, "float16", torch.float16, torch.float16),
])  # fmt: skip
def test_dtype(
    stored: torch.dtype, asked: str, with_instructions: torch.dtype, without: torch.dtype,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tiny_qwen3().to(stored).save_pretrained(tmp_path)
    for has, expected in ((True, with_instructions), (False, without)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert load(tmp_path, asked).dtype == expected


def test_a_torch_without_those_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert not cpu_has_bfloat16()


def test_an_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError):
        load_model(resolve_source(str(folder)), dtype="int8", device=torch.device("cpu"))


def test_weights_are_copies_that_need_no_gradient(folder: Path) -> None:
    decoder = load(folder)
    (folder / "model.safetensors").write_bytes(b"")
    weights = list(decoder.weights.tensors())
    assert not any(tensor.requires_grad for tensor in weights)
    assert all(torch.isfinite(tensor).all() for tensor in weights)
