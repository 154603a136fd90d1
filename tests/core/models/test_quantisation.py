"""Models with weights of 8 and 4 bits: where their integers come from, and that they are all there is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from orca_core.config import Quantization
from orca_core.kernels import Kernels
from orca_core.models import Decoder
from orca_core.models.gguf_blocks import read_blocks
from orca_core.models.native import NativeDecoder
from orca_core.quantised import QuantisedWeight, Weight, plain, quantise
from tests.core.native_rig import Rig, difference, kernels_or_skip
from tests.core.tiny_families import tiny_gpt2, tiny_qwen2
from tests.core.tiny_gguf import write_gguf
from tests.core.tiny_models import VOCAB_SIZE, calmed, load, tiny_llama, tiny_qwen3

IDS = [(7 * i * i + i) % VOCAB_SIZE for i in range(60)]
BITS = {"int8": 8, "int4": 4}
KINDS = {kind.name: kind for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0,
                                      gguf.GGMLQuantizationType.Q4_1)}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Whole blocks of 32."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_or_skip()


def quantised_parts(decoder: Decoder) -> list[QuantisedWeight]:
    return [weight for weight in decoder.weights.tensors() if isinstance(weight, QuantisedWeight)]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_integers_of_safetensors(quantization: Quantization, tied: bool, tmp_path: Path) -> None:
    """Projections have the bits that were asked for, head and embedding 8, norms and biases are left alone."""
    tiny_qwen2(tie_word_embeddings=tied).bfloat16().save_pretrained(tmp_path)
    given, made = load(tmp_path, "bfloat16"), load(tmp_path, "bfloat16", quantization=quantization)
    for theirs, ours in zip(given.weights.tensors(), made.weights.tensors(), strict=True):
        if theirs is given.weights.embedding or theirs is given.weights.head:
            expect(ours, theirs, 8)
        elif len(theirs.shape) == 2:
            expect(ours, theirs, BITS[quantization])
        else:
            assert torch.equal(plain(ours), plain(theirs))
    assert (made.weights.head is made.weights.embedding) == tied
    assert (made.dtype, made.n_parameters) == (torch.bfloat16, given.n_parameters)


def expect(ours: Weight, theirs: Weight, bits: int) -> None:
    assert isinstance(ours, QuantisedWeight)
    assert torch.equal(ours.dequantised(), quantise(plain(theirs), bits, torch.bfloat16).dequantised())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_turned_projections_have_their_scales_along_their_outputs(quantization: Quantization, tmp_path: Path) -> None:
    tiny_gpt2().bfloat16().save_pretrained(tmp_path)
    given, made = load(tmp_path, "bfloat16"), load(tmp_path, "bfloat16", quantization=quantization)
    expect(made.weights.layers[0].qkv.weight, given.weights.layers[0].qkv.weight, BITS[quantization])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_there_once_and_are_small(kernels: Kernels, quantization: Quantization, tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    decoder = load(tmp_path, "bfloat16", quantization=quantization)
    parts, n_bytes = quantised_parts(decoder), decoder.weight_bytes
    assert len(parts) == 4 * 3 + 1
    native = NativeDecoder.taking(decoder, kernels)
    assert [part.nbytes for part in parts if part.integers.untyped_storage().nbytes()] == []
    assert native.weight_bytes == n_bytes == sum(part.nbytes for part in parts) + 2 * 7 * 48
    assert native.n_parameters == load(tmp_path).n_parameters


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_auto_is_what_the_kernels_compute_in(quantization: Quantization, tmp_path: Path) -> None:
    kernels_or_skip()
    tiny_llama().save_pretrained(tmp_path)
    assert load(tmp_path, "auto").dtype == torch.float32
    assert load(tmp_path, "auto", quantization=quantization).dtype == torch.bfloat16


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_read_as_the_library_reads_them(name: str) -> None:
    values = np.random.default_rng(0).normal(size=(37, 96)).astype(np.float32)
    data = gguf.quantize(values, KINDS[name])
    made = read_blocks(name, data, 96, torch.float32)
    assert torch.equal(made.dequantised(), torch.from_numpy(gguf.dequantize(data, KINDS[name])))


def requantised(path: Path, kind_of: Callable[[str], str | None]) -> Path:
    """A copy of a GGUF file whose matrices are of the given types; ``None`` = as it was."""
    reader: Any = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".quantised.gguf"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        kind = kind_of(tensor.name) if len(tensor.shape) == 2 else None
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, KINDS[kind]), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".quantised.gguf")


@pytest.mark.parametrize(("kind", "quantization"), [("Q8_0", "int8"), ("Q4_0", "int8"), ("Q4_0", "int4"),
                                                    ("Q4_1", "int4")])  # fmt: skip
@pytest.mark.parametrize("build", [
    lambda: calmed(tiny_llama(**WIDE)), lambda: calmed(tiny_qwen3(**WIDE, tie_word_embeddings=True)),
])  # fmt: skip
def test_blocks_of_a_file_are_not_rounded_again(
    kernels: Kernels, build: Callable[[], Any], kind: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Nor are their rows mixed up: those of q and k of a llama are in another order there."""
    file = requantised(write_gguf(build().bfloat16(), tmp_path / "a.gguf"), lambda name: kind)
    wide, made = load(file), load(file, "bfloat16", quantization=quantization)
    for theirs, ours in zip(wide.weights.tensors(), made.weights.tensors(), strict=True):
        if isinstance(ours, QuantisedWeight):
            assert torch.equal(ours._wide(slice(None)), plain(theirs))
    assert len(quantised_parts(made)) == 4 * 3 + (1 if made.config.tied_head else 2)
    rigs = (Rig(NativeDecoder.taking(made, kernels)), Rig(wide))
    ours, theirs = (torch.stack([rig.logits("a", IDS[:n]) for n in (1, 5, 20, 60)]) for rig in rigs)
    assert difference(ours, theirs) < 1e-2


def test_more_bits_than_asked_for_are_rounded_and_parts_are_made_alike(tmp_path: Path) -> None:
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q4_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1"}
    file = requantised(
        write_gguf(tiny_llama(**WIDE), tmp_path / "a.gguf"),
        lambda name: kinds.get(name.split(".")[-2], "Q8_0"),
    )
    wide, made = load(file).weights, load(file, "bfloat16", quantization="int4").weights
    for ours, theirs in ((made.layers[0].qkv, wide.layers[0].qkv), (made.layers[0].down, wide.layers[0].down)):
        expect(ours.weight, theirs.weight, 4)
    gates, head = made.layers[0].gate_up.weight, made.head
    assert isinstance(gates, QuantisedWeight)
    assert isinstance(head, QuantisedWeight)
    assert (gates.format.with_minimum, head.format.bits, head.format.grouped) == (True, 8, True)
