"""GGUF files: tiny ones equal the safetensors they were made from; the embedded model equals transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
import transformers
from tqdm import tqdm

from orca_core.config import EMBEDDED_MODEL
from orca_core.errors import ModelLoadError, UnsupportedArchitectureError
from orca_core.models import load_model, read_shape
from orca_core.models.gguf_header import read_gguf_header
from orca_core.models.rope import rope_frequencies
from orca_core.source import resolve_source
from tests.core.tiny_families import (
    gemma3_ropes,
    longrope,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt2,
    tiny_mistral,
    tiny_olmo2,
    tiny_phi3,
    tiny_qwen2,
    tiny_smollm3,
)
from tests.core.tiny_gguf import write_gguf
from tests.core.tiny_models import (
    ROPES,
    Driver,
    load,
    output,
    tiny_llama,
    tiny_qwen3,
    transformers_logits,
)

IDS = list(range(3, 53))
EXACT: Final = {"phi3": 1e-5, "gemma2": 1e-5, "gemma3_text": 1e-5}
"""Where what a file keeps as float32 is a float64 in config.json, or 1 + w: the numbers differ in the last bit."""


def logits(path: Path) -> torch.Tensor:
    driver = Driver(load(path))
    return driver.logits([(driver.start("a", IDS), len(IDS))])


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return caught.value.reason


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gpt2, tiny_gemma3, tiny_phi3])
def test_the_header_alone_says_what_a_slot_holds(build: Any, tmp_path: Path) -> None:
    path = write_gguf(build(), tmp_path / "tiny.gguf")
    limit, shape = read_shape(resolve_source(str(path)), dtype="float32", device=torch.device("cpu"))
    decoder = load(path)
    assert (limit, shape) == (decoder.config.max_position_embeddings, decoder.kv_shape)


def test_a_header_that_is_cut_off_or_no_header_at_all(tmp_path: Path) -> None:
    whole = write_gguf(tiny_llama(), tmp_path / "tiny.gguf").read_bytes()
    values = read_gguf_header("m", tmp_path / "tiny.gguf")
    assert values["llama.context_length"] == 256
    assert "tokenizer.ggml.tokens" not in values
    file = tmp_path / "bad.gguf"
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    nested += struct.pack("<IQ", 9, 2**60) * 100_000
    for data in (b"", b"GGUF", whole[:100], b"x" * 500, whole[:4] + b"\x09" + whole[5:], nested):
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"cannot read bad\.gguf"):
            read_gguf_header("m", file)


@pytest.mark.parametrize("build", [
    tiny_llama,
    lambda: tiny_llama(tie_word_embeddings=True),
    lambda: tiny_llama(attention_bias=True),
    tiny_qwen3,
    lambda: tiny_qwen3(tie_word_embeddings=True),
    tiny_qwen2,
    lambda: tiny_mistral(sliding_window=None),
    tiny_gemma2,
    tiny_gemma3,
    lambda: tiny_gemma2(num_hidden_layers=46, query_pre_attn_scalar=12),  # the 27B model: hidden_size / heads
    lambda: tiny_gemma3(num_hidden_layers=7, sliding_window_pattern=6, rope_parameters=None),
    lambda: tiny_gemma3(rope_parameters=gemma3_ropes(rope_type="linear", factor=4.0), final_logit_softcapping=5.0),
    tiny_gpt2,
    lambda: tiny_gpt2(n_inner=80, tie_word_embeddings=False),
    tiny_olmo2,
    tiny_phi3,
    lambda: tiny_phi3(sliding_window=16),
    lambda: tiny_phi3(rope_parameters={**ROPES["default"], "partial_rotary_factor": 0.67}),
    lambda: tiny_phi3(rope_parameters=longrope(32, 6), original_max_position_embeddings=32),
    tiny_smollm3,
    lambda: tiny_smollm3(attention_bias=True),
])  # fmt: skip
def test_equals_the_safetensors_of_the_same_model(build: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "hf")
    file = write_gguf(model, tmp_path / "a.gguf")
    torch.testing.assert_close(
        logits(file), logits(tmp_path / "hf"), atol=EXACT.get(model.config.model_type, 0), rtol=0
    )
    ours, theirs = load(file).config, load(tmp_path / "hf").config
    assert ours.eos_ids == theirs.eos_ids == (2,)
    assert ours.tied_head == theirs.tied_head
    assert [layer.rope and layer.rope.theta for layer in ours.layers] == [
        layer.rope and layer.rope.theta for layer in theirs.layers
    ]


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_phi3, tiny_gemma2, tiny_gemma3, tiny_gpt2])
def test_transformers_reads_the_weights_alike(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its translation of names, order of rows, transposition and offsets of norms is not ours, nor that of the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that watches its progress bar
    model = build()
    file = write_gguf(model, tmp_path / "a.gguf")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, config=model.config, dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip
    torch.testing.assert_close(logits(file), transformers_logits(oracle.eval(), IDS), atol=1e-4, rtol=0)


def test_scaled_rope(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=ROPES["yarn"])
    file = write_gguf(
        model, tmp_path / "yarn.gguf", rope_scaling_type=gguf.RopeScalingType.YARN, rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=64, rope_scaling_yarn_beta_fast=16.0, rope_scaling_yarn_beta_slow=2.0,
    )  # fmt: skip
    torch.testing.assert_close(logits(file), transformers_logits(model, IDS), atol=1e-4, rtol=0)
    model = tiny_llama(rope_parameters=ROPES["linear"])
    file = write_gguf(
        model, tmp_path / "linear.gguf", rope_scaling_type=gguf.RopeScalingType.LINEAR, rope_scaling_factor=2.5
    )
    torch.testing.assert_close(logits(file), transformers_logits(model, IDS), atol=1e-4, rtol=0)


def test_llama3_rope_is_stored_as_divisors(tmp_path: Path) -> None:
    """The converter writes ``rope_freqs``: by how much each frequency of the unscaled rope is divided."""
    model = tiny_llama(rope_parameters=ROPES["llama3"])
    model.save_pretrained(tmp_path / "hf")
    config = load(tmp_path / "hf").config
    assert config.layers[0].rope is not None
    scaled, _ = rope_frequencies(config, config.layers[0].rope)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    file = write_gguf(model, tmp_path / "a.gguf", tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    torch.testing.assert_close(logits(file), transformers_logits(model, IDS), atol=1e-4, rtol=0)


def test_longrope_of_half_a_pair_is_refused(tmp_path: Path) -> None:
    model = tiny_phi3()
    ones = {"rope_factors_long.weight": np.ones(6)}
    assert "rope scaling" in refusal(write_gguf(model, tmp_path / "a.gguf", tensors=ones))
    assert "rope of two sets" in refusal(write_gguf(tiny_qwen2(), tmp_path / "b.gguf", tensors=ones))


def test_wrong_number_of_divisors(tmp_path: Path) -> None:
    assert "6 divisors" in refusal(
        write_gguf(tiny_llama(), tmp_path / "a.gguf", tensors={"rope_freqs.weight": np.ones(5)})
    )


def test_end_of_turn_ends_a_generation_too(tmp_path: Path) -> None:
    file = write_gguf(tiny_llama(), tmp_path / "a.gguf", eot_token_id=9)
    assert load(file).config.eos_ids == (2, 9)


def test_auto_dtype_is_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tiny_llama(), tmp_path / "a.gguf")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert load(file, "auto").dtype == torch.bfloat16


@pytest.mark.parametrize(("metadata", "named"), [
    ({"expert_count": 8}, "mixtures of experts"),
    ({"sliding_window": 64}, "llama.attention.sliding_window is not supported"),
    ({"rope_dimension_count": 6}, "rope.dimension_count"),
    ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE, "rope_scaling_factor": 2.0}, "rope needs 6 divisors"),
    ({"rope_scaling_type": gguf.RopeScalingType.LINEAR}, "llama.rope.scaling.factor is missing"),
    ({"rope_scaling_attn_factors": 1.2}, "llama.rope.scaling.attn_factor is not supported"),
    ({"block_count": 4}, "missing tensors: model.layers.3.input_layernorm.weight"),
    ({"head_count": 3}, "3 heads cannot share 2"),
    ({"feed_forward_length": 81}, "wrong shapes: model.layers.0.mlp.down_proj.weight is [48, 80], not [48, 81]"),
])  # fmt: skip
def test_refused(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(write_gguf(tiny_llama(), tmp_path / "a.gguf", **metadata))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gptj")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitectureError) as caught:
        load(tmp_path / "a.gguf")
    assert {"llama", "qwen2", "qwen3"} <= set(caught.value.known)


def test_damaged_files(tmp_path: Path) -> None:
    whole = write_gguf(tiny_llama(), tmp_path / "a.gguf").read_bytes()
    for content in (b"", b"GGUF", b"\xff" * 256, whole[:300], whole[: len(whole) // 2]):
        (tmp_path / "a.gguf").write_bytes(content)
        assert "cannot read a.gguf" in refusal(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def embedded_oracle() -> Any:
    source = resolve_source(EMBEDDED_MODEL)
    assert source.gguf_file is not None
    return transformers.AutoModelForCausalLM.from_pretrained(
        source.folder, gguf_file=source.gguf_file.name, dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip


PROMPTS = (
    "Why is the sky blue?",
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived",
)


@pytest.mark.model
@pytest.mark.timeout(240)
def test_embedded_model_speaks_exactly_as_in_transformers(embedded_oracle: Any) -> None:
    """Greedy, float32, 64 tokens of five prompts that share every iteration here; transformers sees each alone."""
    source = resolve_source(EMBEDDED_MODEL)
    assert source.gguf_file is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file.name)
    driver = Driver(load_model(source, dtype="float32", device=torch.device("cpu")))
    requests = [driver.start(text, tokenizer(text)["input_ids"]) for text in PROMPTS]
    for _ in range(64):
        driver.greedy([(request, request.n_uncomputed) for request in requests])
    # one pass of the oracle over prompt + answer: each token must be the most likely one after those before it. By
    # induction that is the oracle's own greedy answer, at a tenth of the time it takes to generate it
    for request in requests:
        choices = transformers_logits(embedded_oracle, request.token_ids[:-1]).argmax(-1).tolist()
        assert output(request) == choices[request.n_prompt_tokens - 1 :]
        assert len(set(output(request))) > 15  # a model that loops would agree with much that is wrong
