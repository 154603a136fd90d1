"""Which decoder and attention an engine gets on a CPU, and what it says where the kernels cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from orca_core import cpu
from orca_core.attention.cpu import NativeAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.config import EngineConfig, Quantization
from orca_core.cpu import choose_compute
from orca_core.engine import Engine
from orca_core.kernels import KernelError, find_kernels
from orca_core.models import Decoder
from orca_core.models.native import NativeDecoder
from orca_core.quantised import QuantisedWeight
from orca_core.types import GenerationResult, SamplingParams
from tests.core.native_rig import Rig, difference, kernels_or_skip
from tests.core.tiny_families import tiny_gemma3
from tests.core.tiny_models import calmed, load, tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

N_VOCAB = 270


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(vocab_size=N_VOCAB).bfloat16().save_pretrained(path)
    save_byte_level(path)
    return path


def test_bfloat16_gets_the_kernels(folder: Path) -> None:
    kernels_or_skip()
    decoder, attention, kernels = choose_compute(load(folder, "bfloat16"))
    assert isinstance(decoder, NativeDecoder)
    assert isinstance(attention, NativeAttention)
    assert kernels is find_kernels()


def test_float32_stays_in_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "find_kernels", lambda: pytest.fail("nobody asked for them"))
    given = load(folder)
    decoder, attention, kernels = choose_compute(given)
    assert decoder is given
    assert isinstance(attention, ReferenceAttention)
    assert kernels is None


def test_a_family_they_do_not_know_gets_their_attention(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels_or_skip()
    tiny_gemma3().save_pretrained(tmp_path)
    given = load(tmp_path, "bfloat16")
    with caplog.at_level(logging.INFO):
        decoder, attention, kernels = choose_compute(given)
    assert decoder is given
    assert isinstance(attention, NativeAttention)
    assert kernels is find_kernels()
    assert "compute attention and draw tokens" in caplog.text


def test_without_them_everything_runs_as_before_and_it_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> None:
        raise KernelError("there is no C++ compiler (g++ or clang++)")

    monkeypatch.setattr(cpu, "find_kernels", none)
    with caplog.at_level(logging.WARNING), Engine(config(folder)) as engine:
        results = generate(engine, 5)
    assert [len(result.token_ids) for result in results] == [12] * 5
    (record,) = caplog.records
    assert record.message.startswith("everything runs in torch")
    assert record.message.endswith("there is no C++ compiler (g++ or clang++)")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_without_them_quantised_weights_are_dequantised_once(
    tmp_path: Path, quantization: Quantization, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Same values as in the kernels, but for rounding; and the log says that they are as large as ever."""
    calmed(tiny_llama(vocab_size=N_VOCAB)).bfloat16().save_pretrained(tmp_path)
    native = Rig(NativeDecoder.taking(load(tmp_path, "bfloat16", quantization=quantization), kernels_or_skip()))
    monkeypatch.setenv("ORCA_KERNELS", "off")
    given = load(tmp_path, "bfloat16", quantization=quantization)
    with caplog.at_level(logging.WARNING):
        decoder, *_ = choose_compute(given)
    assert isinstance(decoder, Decoder)
    assert not decoder.is_quantised
    assert decoder.weight_bytes == load(tmp_path, "bfloat16").weight_bytes
    head = given.weights.head
    assert isinstance(head, QuantisedWeight)
    assert head.integers.untyped_storage().nbytes() == 0
    (message,) = [record.message for record in caplog.records if "no memory is saved" in record.message]
    assert message.startswith("weights are quantised, but held in bfloat16")
    assert message.endswith("they are turned off ($ORCA_KERNELS)")
    assert difference(Rig(decoder).logits("a", prompt(5)), native.logits("a", prompt(5))) < 2e-2


def test_quantised_float32_and_other_families_stay_in_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_gemma3().save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        expected = Rig(load(tmp_path, dtype, quantization="int4")).logits("a", prompt(3, n_vocab=90))
        caplog.clear()
        decoder, *_ = choose_compute(load(tmp_path, dtype, quantization="int4"))
        assert isinstance(decoder, Decoder)
        assert not decoder.is_quantised
        assert len([record for record in caplog.records if "no memory is saved" in record.message]) == 1
        assert torch.equal(Rig(decoder).logits("a", prompt(3, n_vocab=90)), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_engine_with_quantised_weights(folder: Path, quantization: Quantization) -> None:
    kernels_or_skip()
    found = []
    for changes in ({"max_batch_size": 1}, {"max_batch_size": 8, "max_batch_tokens": 9, "prefix_cache": False}):
        with Engine(config(folder, quantization=quantization, **changes)) as engine:
            found.append([result.token_ids for result in generate(engine, 6)])
    assert found[0] == found[1]
    with Engine(config(folder)) as engine:
        assert [result.token_ids for result in generate(engine, 6)] != found[0]


def test_tokens_of_an_engine_do_not_depend_on_its_batches(folder: Path) -> None:
    """In bfloat16, to which rounding else brings other tokens by and by."""
    kernels_or_skip()
    with Engine(config(folder)) as alone:
        expected = [alone.generate([prompt(i)], sampling(i))[0].token_ids for i in range(8)]
    for changes in ({"max_batch_size": 8, "max_batch_tokens": 9}, {"block_size": 1, "prefix_cache": False}):
        with Engine(config(folder, **changes)) as engine:
            assert [result.token_ids for result in generate(engine, 8)] == expected


def config(folder: Path, **changes: object) -> EngineConfig:
    settings = {"max_batch_size": 6, "max_batch_tokens": 40, "block_size": 4, "n_slots": 600, **changes}
    return EngineConfig(model=str(folder), dtype="bfloat16", device="cpu", **settings)  # type: ignore[arg-type]


def prompt(i: int, n_vocab: int = N_VOCAB) -> list[int]:
    return [3 + (i * 7 + j * j) % (n_vocab - 3) for j in range(1 + 11 * i)]


def sampling(i: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=12, ignore_eos=True, seed=i, temperature=0.7 * (i % 2))


def generate(engine: Engine, n: int) -> list[GenerationResult]:
    return engine.generate([prompt(i) for i in range(n)], [sampling(i) for i in range(n)])
