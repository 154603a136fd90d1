"""A tiny model in bfloat16 on the GPU, and executors over it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from orca_core.attention import AttentionBackend
from orca_core.attention.cuda import VarlenAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.executor import ModelExecutor
from orca_core.graphs import CudaGraphRunner, IncrementGraphs
from orca_core.kv import KVManager, KVPool
from orca_core.models import Decoder, load_model
from orca_core.params import SamplingParams
from orca_core.request import Request
from orca_core.source import resolve_source
from orca_core.types import GenerationRequest
from tests.core.tiny_models import tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

BLOCK = 256
MAX_BATCH_SIZE = 6
MAX_CONTEXT = 1024


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 query heads of size 64 share 2 key heads. Small weights: what rounds differently stays a small difference."""
    path: Path = tmp_path_factory.mktemp("llama")
    model = tiny_llama(
        vocab_size=270, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, max_position_embeddings=MAX_CONTEXT,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.2)
    model.save_pretrained(path)
    save_byte_level(path)
    return path


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def decoder(folder: Path, device: torch.device) -> Decoder:
    return load_model(resolve_source(str(folder)), dtype="bfloat16", device=device)


@dataclass(slots=True)
class Rig:
    """One executor with a pool and a ledger of its own."""

    kv: KVManager
    pool: KVPool
    attention: AttentionBackend
    executor: ModelExecutor
    decoder: Decoder

    def start(self, name: str, n_prompt: int, sampling: SamplingParams | None = None) -> Request:
        ids = tuple(random.Random(name).choices(range(3, 270), k=n_prompt))
        request = Request(GenerationRequest(name, ids, 64, 7, sampling or SamplingParams()), 0.0)
        assert self.kv.reserve(name, request.total_tokens)
        request.admit(0.0)
        return request

    def batch(self, chosen: Sequence[tuple[Request, int]]) -> Batch:
        return build_batch([Scheduled(request, n) for request, n in chosen], self.kv, self.decoder.device)

    @torch.inference_mode()
    def logits(self, chosen: Sequence[tuple[Request, int]]) -> torch.Tensor:
        """One iteration, on whatever path the executor takes; float32 on the host, one row a span that samples."""
        batch = self.batch(chosen)
        logits = self.executor._logits(batch)
        for request, n in chosen:
            request.advance(n)
        return torch.empty(0) if logits is None else logits.cpu()


class Rigs:
    """Makes executors that differ in one thing."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def make(self, *, reference: bool = False, graphs: bool = False) -> Rig:
        device = self._decoder.device
        kv = KVManager(MAX_BATCH_SIZE * MAX_CONTEXT, BLOCK, MAX_BATCH_SIZE)
        pool = KVPool(self._decoder.kv_shape, kv.n_blocks + 1, BLOCK, device)
        varlen = VarlenAttention(BLOCK, device)
        captured = None
        if graphs:
            captured = IncrementGraphs(
                self._decoder, pool, varlen, CudaGraphRunner(device),
                max_batch_size=MAX_BATCH_SIZE, max_context=MAX_CONTEXT, spare_block=kv.n_blocks,
            )  # fmt: skip
        attention = ReferenceAttention() if reference else varlen
        return Rig(kv, pool, attention, ModelExecutor(self._decoder, pool, attention, graphs=captured), self._decoder)


@pytest.fixture
def rigs(decoder: Decoder) -> Rigs:
    return Rigs(decoder)
