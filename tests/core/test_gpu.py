"""Loading for a GPU, and a whole engine on its path, with stand-ins for kernel, graphs and memory."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orca_core.attention.base import AttentionSpec
from orca_core.attention.cuda import VarlenAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel, ModelExecutor
from orca_core.gpu import GpuLoading, choose_attention
from orca_core.graphs import Computation, GraphRunner
from orca_core.kv import KVManager, KVPool
from orca_core.loader import load_engine_model
from orca_core.memory import kv_budget_cuda
from orca_core.models import Decoder
from orca_core.request import Request
from orca_core.types import GenerationRequest, SamplingParams
from tests.core.attention.varlen_stand_in import VarlenStandIn
from tests.core.gpu_stand_in import GIB, FakeMeter
from tests.core.graph_stand_in import RerunGraphRunner
from tests.core.tiny_models import load, tiny_qwen3
from tests.core.tiny_tokenizers import save_byte_level

CPU = torch.device("cpu")
BLOCK = 4
N_VOCAB = 270


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3")
    tiny_qwen3(vocab_size=N_VOCAB).save_pretrained(path)
    save_byte_level(path)
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder)


def varlen() -> VarlenAttention:
    return VarlenAttention(BLOCK, CPU, VarlenStandIn(BLOCK, dtypes=(torch.float32,)))


def config(**changes: object) -> EngineConfig:
    settings = {"max_batch_size": 6, "max_batch_tokens": 40, "block_size": BLOCK, "device": "cpu", **changes}
    return EngineConfig(**settings)  # type: ignore[arg-type]


# ---- which attention


@pytest.mark.parametrize(("dtype", "capability", "backend", "said"), [
    ("bfloat16", (9, 0), VarlenAttention, ""), ("float16", (8, 0), VarlenAttention, ""),
    ("float32", (9, 0), ReferenceAttention, "float32"), ("bfloat16", (7, 5), ReferenceAttention, "7.5"),
])  # fmt: skip
def test_what_torch_cannot_do_is_done_in_plain_torch_and_logged(
    dtype: str, capability: tuple[int, int], backend: type, said: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert type(choose_attention(load(folder, dtype), 256)) is backend
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


# ---- memory and graphs while loading


class GreedyRunner(RerunGraphRunner):
    """Each capture takes memory, which comes free with the runner's graphs."""

    def __init__(self, meter: FakeMeter, each: int) -> None:
        super().__init__()
        self._meter = meter
        self._each = each

    def capture(self, compute: Computation) -> Computation:
        replay = super().capture(compute)
        self._meter.use(0, self._each)
        weakref.finalize(replay, self._meter.use, 0, -self._each)
        return replay


def test_graphs_count_before_the_slots_are_decided(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    meter = FakeMeter()
    loading = GpuLoading(config(), decoder, varlen(), 64, meter, lambda: GreedyRunner(meter, GIB))
    budget = loading.kv_budget(BLOCK)
    gc.collect()
    assert meter.reserved == 0  # the trial gave everything back
    assert budget == kv_budget_cuda(meter.read(), 4 * GIB, config())  # for batches of 1, 2, 4 and 6
    assert "graphs 4096" in caplog.text
    assert loading.extra_blocks == 1
    pool = KVPool(decoder.kv_shape, 31, BLOCK, CPU)
    graphs = loading.graphs(pool)
    assert graphs is not None
    assert meter.reserved == 4 * GIB


def test_without_graphs_nothing_is_kept_for_them(decoder: Decoder) -> None:
    for attention, runner in ((ReferenceAttention(), RerunGraphRunner), (varlen(), None)):
        meter = FakeMeter()
        loading = GpuLoading(config(), decoder, attention, 64, meter, runner)
        assert loading.kv_budget(BLOCK) == int(0.9 * meter.total)
        assert loading.extra_blocks == 0
        assert loading.graphs(KVPool(decoder.kv_shape, 30, BLOCK, CPU)) is None


class BrokenRunner:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def capture(self, compute: Computation) -> Computation:
        raise self._error


def test_graphs_that_cannot_be_captured_are_done_without(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> GraphRunner:
        return BrokenRunner(RuntimeError("operation not permitted when stream is capturing"))

    loading = GpuLoading(config(), decoder, varlen(), 64, FakeMeter(), broken)
    assert loading.kv_budget(BLOCK) > 0
    assert "cannot be captured" in caplog.text
    assert "not permitted" in caplog.text
    assert (loading.extra_blocks, loading.graphs(KVPool(decoder.kv_shape, 30, BLOCK, CPU))) == (0, None)
    full = GpuLoading(config(), decoder, varlen(), 64, FakeMeter(), lambda: BrokenRunner(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        full.kv_budget(BLOCK)


# ---- a whole engine


def test_an_engine_on_the_path_of_a_gpu_says_what_the_plain_one_says(folder: Path, decoder: Decoder) -> None:
    """Pieces of prompts, increments from graphs, requests that join and leave: token for token."""
    plain = load_engine_model(config(model=str(folder), dtype="float32", n_slots=600))
    attention, runner = varlen(), RerunGraphRunner()
    pool = KVPool(decoder.kv_shape, KVManager.blocks_needed(600, BLOCK, 6) + 1, BLOCK, CPU)
    loading = GpuLoading(config(), decoder, attention, plain.info.max_model_len, FakeMeter(), lambda: runner)
    executor = ModelExecutor(decoder, pool, attention, frozenset(plain.info.eos_ids), loading.graphs(pool))
    rng = random.Random(3)
    prompts = [[rng.randrange(3, N_VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    params = [
        SamplingParams(max_new_tokens=rng.randint(1, 12), ignore_eos=True, seed=i, temperature=rng.choice([0.0, 0.9]))
        for i in range(14)
    ]
    results = []
    for model in (plain, LoadedModel(executor, plain.tokenizer, plain.info)):
        with Engine(config(), model=model) as engine:
            results.append([result.token_ids for result in engine.generate(prompts, params)])
    assert results[0] == results[1]
    assert runner.replayed


# ---- trouble on the device


def test_after_out_of_memory_nothing_of_the_iteration_is_held(decoder: Decoder) -> None:
    """D9: the failed iteration's tensors hang on the error, which the loop still has in its hands."""
    executor = ModelExecutor(decoder, KVPool(decoder.kv_shape, 2, BLOCK, CPU), ReferenceAttention())
    held: list[weakref.ref[torch.Tensor]] = []

    def iteration() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        iteration()
    assert held[0]() is not None
    assert executor.recover(caught.value)
    assert held[0]() is None
    assert executor.recover(ValueError("something else"))
    assert not executor.recover(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


class Forward:
    """Attention that only has the right shape, and asks the device nothing."""

    def prepare(self, batch: Batch) -> None:
        pass

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        return q.contiguous()


class Questions(TorchDispatchMode):
    """Names of operations whose result, or its shape, the host has to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(
        self, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [x for x in indices or () if isinstance(x, torch.Tensor) and x.dtype is torch.bool]  # type: ignore[attr-defined]
        if name in self.WAITING or masks:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}, {"logprobs": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logit_bias": {3: 1.0}},
    {"min_new_tokens": 2},
])  # fmt: skip
def test_an_iteration_asks_the_device_once(
    decoder: Decoder, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sampled comes up in one read, and nothing on the way needs an answer first."""
    kv = KVManager(64, BLOCK, 2)
    executor = ModelExecutor(decoder, KVPool(decoder.kv_shape, kv.n_blocks, BLOCK, CPU), Forward(), frozenset({2}))
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    requests = [Request(GenerationRequest(str(i), (5, 6, 7), 4, 0, params), 0.0) for i in range(2)]
    for request in requests:
        assert kv.reserve(request.request_id, request.total_tokens)
        request.admit(0.0)
    batch = build_batch([Scheduled(request, 3) for request in requests], kv, CPU)
    reads: list[int] = []

    def read_back(tensors: Sequence[torch.Tensor]) -> list[object]:
        reads.append(len(tensors))
        return [tensor.numpy() for tensor in tensors]

    monkeypatch.setattr("orca_core.sampling.sampler.read_back", read_back)
    with Questions() as questions:
        tokens = executor.run_iteration(batch)
    assert all(token.ok for token in tokens)
    assert questions.asked == []
    assert len(reads) == 1
