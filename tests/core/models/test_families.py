"""What a family has that others have not: that it matters, where it is read from, and what of it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_core.errors import ModelLoadError
from orca_core.models import Decoder
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
from tests.core.tiny_models import ROPES, Driver, load, output, transformers_greedy, transformers_logits

IDS = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(decoder: Decoder) -> torch.Tensor:
    driver = Driver(decoder)
    return driver.logits([(driver.start("a", IDS), len(IDS))])


def assert_parity(decoder: Decoder, oracle: Any) -> None:
    torch.testing.assert_close(logits(decoder), transformers_logits(oracle, IDS), atol=1e-4, rtol=0)


def save(model: Any, folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A checkpoint whose config.json lacks some fields and has others changed."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in values.items() if name not in drop}))
    return folder


def windows(decoder: Decoder) -> list[int | None]:
    return [layer.window for layer in decoder.config.layers]


# ---- windows


@pytest.mark.parametrize(("build", "changes", "expected"), [
    (tiny_qwen2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, [None, None, 9]),
    (tiny_mistral, {"sliding_window": 9}, [9, 9, 9]),
    (tiny_mistral, {"sliding_window": None}, [None, None, None]),
    (tiny_smollm3, {"use_sliding_window": True, "sliding_window": 9}, [None, None, None, 9, None]),
    (tiny_phi3, {"sliding_window": 9}, [9, 9, 9]),
    (tiny_gemma2, {"sliding_window": 9}, [9, None, 9, None]),
    (tiny_gemma3, {"sliding_window": 9}, [9, 9, None, 9]),
    (tiny_qwen2, {"use_sliding_window": False, "sliding_window": 9}, [None, None, None]),
    (tiny_qwen2, {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention",
     "full_attention", "full_attention"]}, [9, None, None]),
])  # fmt: skip
def test_which_layers_have_a_window(
    build: Callable[..., Any], changes: dict[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    """Also where ``layer_types``, which transformers writes since version 5, is not there."""
    model = build(**changes)
    decoder = load(save(model, tmp_path))
    assert windows(decoder) == expected
    assert_parity(decoder, model)
    if "layer_types" not in changes:
        assert windows(load(save(model, tmp_path, drop=("layer_types",), sliding_window_pattern=3))) == expected


def test_a_window_hides_what_is_before_it(tmp_path: Path) -> None:
    model = tiny_qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    narrow, wide = logits(load(save(model, tmp_path))), logits(load(save(model, tmp_path, sliding_window=50)))
    torch.testing.assert_close(narrow[:16], wide[:16])
    assert ((narrow - wide).abs().amax(dim=-1)[16:] > 1e-2).all()


def test_a_mistral_that_says_nothing_has_the_window_of_the_first(tmp_path: Path) -> None:
    assert windows(load(save(tiny_mistral(), tmp_path, drop=("sliding_window",)))) == [4096] * 3


# ---- ropes


def has_rope(decoder: Decoder) -> list[bool]:
    return [layer.rope is not None for layer in decoder.config.layers]


def test_layers_without_rope(tmp_path: Path) -> None:
    model = tiny_smollm3(no_rope_layers=[1, 0, 1, 1, 0])
    decoder = load(save(model, tmp_path))
    assert has_rope(decoder) == [True, False, True, True, False]
    assert_parity(decoder, model)
    by_default = load(save(model, tmp_path, drop=("no_rope_layers",)))
    assert has_rope(by_default) == [True, True, True, False, True]
    assert (logits(by_default) - logits(decoder)).abs().max() > 0.1
    assert has_rope(load(save(model, tmp_path, drop=("no_rope_layers",), no_rope_layer_interval=2))) == [
        True, False, True, False, True,
    ]  # fmt: skip


def test_gemma3_ropes_as_the_files_of_the_hub_have_them(tmp_path: Path) -> None:
    """Those were written by transformers 4."""
    model = tiny_gemma3(rope_parameters=gemma3_ropes(rope_type="linear", factor=4.0))
    decoder = load(save(
        model, tmp_path, drop=("rope_parameters", "layer_types"), rope_theta=5000.0, rope_local_base_freq=100.0,
        rope_scaling={"factor": 4.0, "rope_type": "linear"}, sliding_window_pattern=3,
    ))  # fmt: skip
    assert_parity(decoder, model)
    bare = load(save(model, tmp_path, drop=("rope_parameters",)))
    thetas = [layer.rope and layer.rope.theta for layer in bare.config.layers]
    assert thetas == [1e4, 1e4, 1e6, 1e4]


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize(("partial", "n_divisors"), [(1.0, 6), (0.67, 4)])
def test_longrope_uses_the_set_for_the_length_that_is_served(
    name: str, partial: float, n_divisors: int, tmp_path: Path
) -> None:
    """The oracle goes by the length of the sequence: 50 here is more than 32, and 20 is less."""
    rope = longrope(32, n_divisors, partial_rotary_factor=partial)
    model = tiny_phi3(rope_parameters=rope, original_max_position_embeddings=32)
    folder = save(model, tmp_path, rope_parameters=None, rope_scaling={**rope, "type": name, "rope_type": None},
                  rope_theta=10000.0, partial_rotary_factor=partial)  # fmt: skip
    assert_parity(load(folder), model)
    long, short = Driver(load(folder)), Driver(load(folder, max_model_len=32))
    assert short.decoder.config.max_position_embeddings == 32
    ours = short.logits([(short.start("a", IDS[:20], 4), 20)])
    torch.testing.assert_close(ours, transformers_logits(model, IDS[:20]), atol=1e-4, rtol=0)
    assert (ours - long.logits([(long.start("a", IDS[:20], 4), 20)])).abs().max() > 0.1


def test_longrope_generates_like_transformers_beyond_its_original_limit(tmp_path: Path) -> None:
    model = tiny_phi3(rope_parameters=longrope(32, 6), original_max_position_embeddings=32)
    driver = Driver(load(save(model, tmp_path)))
    request = driver.start("a", IDS, 20)
    for n in (7, 30, 13, *[1] * 19):
        driver.greedy([(request, n)])
    assert output(request) == transformers_greedy(model, IDS, 20)


# ---- GPT-2


def test_gpt2_as_its_first_files_have_it(tmp_path: Path) -> None:
    """Without the prefix of the model with a head, and with the causal mask as a buffer of every layer."""
    model = tiny_gpt2()
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for index in range(3):
        tensors[f"h.{index}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
        tensors[f"h.{index}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_parity(load(tmp_path), model)
    tensors["h.0.attn.c_attn.extra"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: h\.0\.attn\.c_attn\.extra"):
        load(tmp_path)


def test_learned_positions_of_a_shorter_model_stay_whole(tmp_path: Path) -> None:
    model = tiny_gpt2()
    decoder = load(save(model, tmp_path), max_model_len=64)
    assert decoder.config.max_position_embeddings == 64
    assert_parity(decoder, model)


# ---- caps and scales


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"])
def test_what_gemma2_has_where_the_file_is_silent(name: str, tmp_path: Path) -> None:
    """As transformers: no cap is not the same as no word about it."""
    model = tiny_gemma2()
    silent = load(save(model, tmp_path, drop=(name,)))
    default = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}[name]
    torch.testing.assert_close(logits(silent), logits(load(save(model, tmp_path, **{name: default}))))
    assert (logits(silent) - logits(load(save(model, tmp_path)))).abs().max() > 1e-2
    assert load(save(model, tmp_path, drop=("tie_word_embeddings",))).config.tied_head


@pytest.mark.parametrize(("build", "changes", "named"), [
    (tiny_qwen2, {"layer_types": ["full_attention"]}, "layer_types must have 3 entries"),
    (tiny_qwen2, {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported; known: full_"),
    (tiny_qwen2, {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window is missing"),
    (tiny_qwen2, {"use_sliding_window": True, "sliding_window": 0, "layer_types": None, "max_window_layers": 0},
     "a window must have at least 1"),
    (tiny_mistral, {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "must all be alike"),
    (tiny_mistral, {"attention_bias": True}, "missing tensors"),
    (tiny_smollm3, {"no_rope_layers": [1, 1]}, "no_rope_layers must have 5 entries"),
    (tiny_smollm3, {"no_rope_layers": [1, 1, 2, 1, 1]}, "0 (no rope) or 1"),
    (tiny_smollm3, {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layers must"),
    (tiny_phi3, {"rope_parameters": longrope(32, 5)}, "rope needs 6 divisors, none of them 0"),
    (tiny_phi3, {"rope_parameters": longrope(32, 6, long_factor=[1.0] * 5)}, "rope needs 6 divisors"),
    (tiny_phi3, {"rope_parameters": longrope(32, 6, short_factor=[0.0] * 6)}, "none of them 0"),
    (tiny_phi3, {"rope_parameters": longrope(32, 6, short_factor=["1"])}, "short_factor must be a list of finite"),
    (tiny_phi3, {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 0.6}}, "cannot rotate 7 elements"),
    (tiny_phi3, {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 1.5}}, "cannot rotate 18 elements"),
    (tiny_olmo2, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "no sliding windows"),
    (tiny_gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
    (tiny_gemma3, {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
    (tiny_gemma3, {"rope_parameters": {"rope_type": "default"}}, "must have full_attention and sliding_attention"),
    (tiny_gemma2, {"sliding_window": None}, "sliding_window is missing"),
    (tiny_gemma2, {"hidden_activation": "gelu"}, "activation 'gelu' is not supported"),
    (tiny_gemma2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
    (tiny_gemma2, {"final_logit_softcapping": -1.0}, "logit_softcap must be above 0"),
    (tiny_gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false"),
    (tiny_gpt2, {"scale_attn_weights": False}, "scale_attn_weights must be true"),
    (tiny_gpt2, {"add_cross_attention": True}, "add_cross_attention must be false"),
    (tiny_gpt2, {"activation_function": "relu"}, "activation 'relu' is not supported"),
    (tiny_gpt2, {"n_embd": None}, "n_embd is missing"),
    (tiny_gpt2, {"n_positions": 128}, "transformer.wpe.weight is [256, 48], not [128, 48]"),
    (tiny_qwen2, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
])  # fmt: skip
def test_refused(build: Callable[..., Any], changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(save(build(), tmp_path, **changes))
    assert named in caught.value.reason
