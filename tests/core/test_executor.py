"""The executor over a tiny model: whose sampling fails, fails alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from orca_core import executor as executor_module
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import InternalError
from orca_core.kernels import Kernels
from orca_core.results import collect
from orca_core.sampling import SampledToken, SamplingRow, sample
from orca_core.types import SamplingParams
from tests.core.tiny_models import tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

BAD_SEED = 666


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(vocab_size=270).save_pretrained(folder)
    save_byte_level(folder)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", n_slots=500, threads=1)
    with Engine(config) as made:
        yield made


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, temperature=0.9, seed=seed, ignore_eos=True)


def test_one_whose_sampling_fails_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [engine.generate([[5, 6, seed]], sampling(seed))[0].token_ids for seed in (1, 2)]

    def failing(logits: torch.Tensor, rows: Sequence[SamplingRow], kernels: Kernels | None) -> list[SampledToken]:
        if any(row.seed == BAD_SEED and row.position > 5 for row in rows):
            raise IndexError("a bug that one row sets off")
        return sample(logits, rows, kernels)

    monkeypatch.setattr(executor_module, "sample", failing)
    requests = [engine.make_request([5, 6, min(seed, 9)], sampling(seed)) for seed in (1, BAD_SEED, 2)]
    channels = engine.submit_all(requests)
    others = collect([requests[0], requests[2]], [channels[0], channels[2]], lambda: None)
    assert [result.token_ids for result in others] == expected
    with pytest.raises(InternalError):
        list(channels[1])
    load = engine.load()
    assert (load.reserved_slots, load.running) == (0, 0)
    assert engine.health().ok


def test_a_full_memory_is_nobodys_own_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling row by row would only meet it again: the iteration fails as a whole, and the engine goes on."""

    def full(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(executor_module, "sample", full)
        with pytest.raises(InternalError):
            engine.generate([[5], [6]], sampling(1))
    assert len(engine.generate([[5]], sampling(1))[0].token_ids) == 8
