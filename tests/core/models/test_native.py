"""Decoders in the CPU kernels: near float32, and the same to the last bit in whatever batch and pieces."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orca_core.attention.cpu import NativeAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.config import Quantization
from orca_core.kernels import Kernels
from orca_core.kernels.structs import CTimes
from orca_core.kv import KVPool, KVShape
from orca_core.models import Decoder, load_model
from orca_core.models.native import NativeDecoder, why_not_native
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.warmup import worst_batch
from tests.core.native_rig import CPU, Rig, difference, kernels_or_skip
from tests.core.tiny_families import VARIANTS
from tests.core.tiny_models import VOCAB_SIZE, calmed, load, tiny_llama

NATIVE = [name for name in VARIANTS if name.split("-")[0] in ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")]
IDS = [(7 * i * i + i) % VOCAB_SIZE for i in range(150)]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
TOLERANCE = 1e-2
"""‖Δlogits‖ / ‖logits‖ against float32 computed from the same weights."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_or_skip()


def saved(folder: Path, name: str) -> Path:
    """A checkpoint that bfloat16 and float32 read alike."""
    calmed(VARIANTS[name]()).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", NATIVE)
def test_is_near_float32(kernels: Kernels, name: str, quantization: Quantization, tmp_path: Path) -> None:
    """Of the same integers where there are some: torch computes with what they stand for."""
    folder = saved(tmp_path, name)
    native = Rig(NativeDecoder.taking(load(folder, "bfloat16", quantization=quantization), kernels))
    wide = Rig(load(folder, quantization=quantization))
    ours, theirs = (torch.stack([rig.logits("a", IDS[:n]) for n in (1, 2, 20, 40, 150)]) for rig in (native, wide))
    assert difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in NATIVE])
def test_other_families_keep_torch_and_attend_natively(kernels: Kernels, name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    decoder = load(folder, "bfloat16")
    assert why_not_native(decoder, decoder.weights.layers[0]) is not None
    native, wide = Rig(decoder, NativeAttention(kernels)), Rig(load(folder))
    assert difference(native.logits("a", IDS), wide.logits("a", IDS)) < 2 * TOLERANCE  # torch rounds more often


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def windowed(
    kernels: Kernels, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> NativeDecoder:
    """Layers with and without windows and rope."""
    folder = saved(tmp_path_factory.mktemp("smollm3"), "smollm3-windows")
    return NativeDecoder.taking(load(folder, "bfloat16", quantization=request.param), kernels)


@pytest.mark.parametrize("seed", range(6))
def test_batches_and_pieces_change_no_bit(windowed: NativeDecoder, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 2, 65, rng.randint(1, 200)])) for _ in range(5)]
    alone = [Rig(windowed).logits("a", prompt) for prompt in prompts]
    rig = Rig(windowed, block_size=rng.choice([1, 4, 16]))
    waiting = [(rig.start(str(i), prompt), i) for i, prompt in enumerate(prompts)]
    found: dict[int, torch.Tensor] = {}
    while waiting:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        left = [len(prompts[i]) - request.n_computed for request, i in chosen]
        pieces = [rng.choice([1, n, rng.randint(1, n)]) for n in left]
        logits = rig.step([(request, n) for (request, _), n in zip(chosen, pieces, strict=True)])
        ended = [i for (_, i), n, piece in zip(chosen, left, pieces, strict=True) if n == piece]
        assert (logits is None) == (not ended)
        found.update({i: logits[row] for row, i in enumerate(ended) if logits is not None})
        waiting = [each for each in waiting if each[1] not in found]
    assert all(torch.equal(found[i], alone[i]) for i in range(len(prompts)))


def test_threads_change_no_bit(windowed: NativeDecoder) -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            results.append(Rig(windowed).logits("a", IDS))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_weights_are_there_once(kernels: Kernels, tmp_path: Path) -> None:
    decoder = load(saved(tmp_path, "llama-tied"), "bfloat16")
    n_parameters, layer = decoder.n_parameters, decoder.weights.layers[0]
    native = NativeDecoder.taking(decoder, kernels)
    assert native.n_parameters == n_parameters
    for tensor in (decoder.weights.embedding, layer.qkv.weight, layer.gate_up.weight, layer.down.weight):
        assert tensor.untyped_storage().nbytes() == 0


def test_what_would_read_beyond_memory_is_refused(windowed: NativeDecoder) -> None:
    rig = Rig(windowed)
    with pytest.raises(ValueError, match="token outside"):
        rig.step([(rig.start("a", [1, VOCAB_SIZE]), 2)])
    for blocks, message in (((0, 9999), "block outside"), ((0,), "shorter than its context")):
        batch = worst_batch(1, 5, 5, 4, CPU)
        with pytest.raises(ValueError, match=message):
            windowed.next_logits(
                replace(batch, spans=(batch.spans[0]._replace(blocks=blocks),)), rig.pool, rig.attention
            )
    with pytest.raises(ValueError, match="not this model's"):
        Rig(windowed).decoder.next_logits(*other_models_batch())


def other_models_batch() -> tuple[Batch, KVPool, ReferenceAttention]:
    pool = KVPool(KVShape(1, 1, 16, torch.bfloat16), 1, 4, CPU)
    return worst_batch(1, 1, 4, 4, CPU), pool, ReferenceAttention()


def test_float32_is_not_computed(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert why_not_native(decoder, decoder.weights.layers[0]) == "it is in float32, not bfloat16"


# --- the embedded model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_embedded_model_says_what_float32_says(kernels: Kernels) -> None:
    """Over a text, one increment after the other: near in logits, and the same most likely token but for near ties."""
    source = resolve_source("smollm2-135m-instruct")
    ids = Tokenizer.load(source).encode("The whale that hunts whales is called an orca. It lives in all oceans, ")
    decoder = load_model(source, dtype="bfloat16", device=CPU)
    oracle = all_logits(widened(decoder), ids)
    native = teacher_forced(Rig(NativeDecoder.taking(decoder, kernels), block_size=16), ids)
    assert difference(native, oracle) < TOLERANCE
    assert (native.argmax(-1) == oracle.argmax(-1)).float().mean() > 0.9


def widened(decoder: Decoder) -> Decoder:
    """The same weights in float32."""
    wide = copy.deepcopy(decoder)
    for tensor in wide.weights.tensors():
        tensor.data = tensor.float()
    return Decoder(wide.config, wide.weights)


@torch.inference_mode()
def all_logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """After each of ``ids``, ``[len(ids), vocab]``."""
    rig = Rig(decoder, block_size=16)
    batch = build_batch([Scheduled(rig.start("text", ids), len(ids))], rig.kv, CPU)
    rig.attention.prepare(batch)
    return decoder.logits(decoder.forward(batch, rig.pool, rig.attention))


def teacher_forced(rig: Rig, ids: list[int]) -> torch.Tensor:
    """After each of ``ids``, ``[len(ids), vocab]``, in iterations of one row."""
    rows = []
    request = rig.start("text", ids[:1], len(ids))
    for token in [*ids[1:], 0]:
        logits = rig.step([(request, 1)])
        assert logits is not None
        rows.append(logits[0])
        request.append(token, 0.0)
    return torch.stack(rows)


def test_where_the_time_goes_is_told_when_it_is_asked_for(kernels: Kernels, tmp_path: Path) -> None:
    """And nothing else changes."""
    decoder = NativeDecoder.taking(load(saved(tmp_path, "qwen3"), "bfloat16"), kernels)
    expected = Rig(decoder).logits("a", IDS, (100, 50))
    decoder.times = times = CTimes()
    assert torch.equal(Rig(decoder).logits("a", IDS, (100, 50)), expected)
    steps = (times.linear, times.attention, times.rows)
    assert min(steps) > 0
    assert sum(steps) <= times.all
    before = times.all
    decoder.times = None
    Rig(decoder).logits("a", IDS)
    assert times.all == before
