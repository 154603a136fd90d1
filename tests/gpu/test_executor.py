"""Graphs, synchronisation, memory and tokens on a real GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from orca_core import staging
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import InsufficientMemoryError
from orca_core.types import SamplingParams
from tests.gpu.conftest import Rigs

pytestmark = pytest.mark.gpu

TOLERANCE = 0.05
"""Of the largest logit. bfloat16 keeps 8 bits, and three layers add their roundings up."""


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


def test_the_cuda_backend_in_the_model_is_near_the_reference(rigs: Rigs) -> None:
    one, two = rigs.make(), rigs.make(reference=True)
    a, b = ([rig.start("a", 300), rig.start("b", 40)] for rig in (one, two))
    for pieces in ([(0, 256), (1, 40)], [(0, 44)]):
        assert_near(one.logits([(a[i], n) for i, n in pieces]), two.logits([(b[i], n) for i, n in pieces]))


def test_a_graph_is_near_the_plain_path(rigs: Rigs) -> None:
    """They join and leave; buckets of 1, 2, 4 and 6 are used, and the tokens chosen are forced to be the same."""
    one, two = rigs.make(graphs=True), rigs.make()
    lengths = [300, 5, 1, 255, 256]
    a, b = ([rig.start(str(i), n) for i, n in enumerate(lengths)] for rig in (one, two))
    prompts = [one.logits([(r, n) for r, n in zip(a, lengths, strict=True)]),
               two.logits([(r, n) for r, n in zip(b, lengths, strict=True)])]  # fmt: skip
    assert_near(*prompts)
    everyone = range(5)
    for present in (everyone, everyone, (0, 1, 3), (3, 0), (4,), (4,), everyone):
        for i in present:
            a[i].append(10 + i, 0.0)
            b[i].append(10 + i, 0.0)
        assert_near(one.logits([(a[i], 1) for i in present]), two.logits([(b[i], 1) for i in present]))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"logprobs": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {7: 1.0}, "min_new_tokens": 2},
])  # fmt: skip
def test_the_host_waits_only_to_read(
    rigs: Rigs, graphs: bool, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that makes the host wait for the device raises; only the one read of the results may."""
    real = staging.read_back

    def read_back(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr("orca_core.sampling.sampler.read_back", read_back)
    rig = rigs.make(graphs=graphs)
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    requests = [rig.start(str(i), 30, params) for i in range(3)]

    def iterate(n: int) -> None:
        batch = rig.batch([(request, n) for request in requests])
        tokens = rig.executor.run_iteration(batch)
        for request, token in zip(requests, tokens, strict=True):
            assert token.ok
            request.advance(n)
            request.append(token.token_id, 0.0)

    iterate(30)  # libraries set themselves up, which may synchronise
    iterate(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        iterate(1)
        iterate(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the engine


def config(folder: Path, **changes: object) -> EngineConfig:
    settings = {"max_batch_size": 8, "max_batch_tokens": 512, "memory_utilization": 0.5, **changes}
    return EngineConfig(model=str(folder), device="cuda", **{"dtype": "bfloat16", **settings})  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    return [[3 + (7 * i + j) % 250 for j in range(20 + 30 * i)] for i in range(8)]


def test_tokens_do_not_depend_on_the_path_in_float32(folder: Path) -> None:
    """float32 runs on the reference backend there: greedy tokens are those of the CPU."""
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    found = []
    for device, block_size in (("cuda", None), ("cpu", 16)):
        c = EngineConfig(
            model=str(folder), device=device, dtype="float32", block_size=block_size, max_kv_bytes=64 << 20,
            max_batch_size=4,
        )  # fmt: skip
        with Engine(c) as engine:
            found.append([result.token_ids for result in engine.generate(prompts(), params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_an_engine_in_bfloat16_answers_everybody(folder: Path, cuda_graphs: bool) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.7, seed=1, logprobs=2)
    with Engine(config(folder, cuda_graphs=cuda_graphs)) as engine:
        results = engine.generate(prompts() * 3, params)
        assert [len(result.token_ids) for result in results] == [40] * 24
        assert engine.load().reserved_slots == 0


def test_the_measured_slots_leave_room_for_the_worst_batch(folder: Path) -> None:
    """D9, D10: after start, everything at once, at its longest, with log-probabilities and penalties."""
    with Engine(config(folder, memory_utilization=0.9)) as engine:
        info = engine.info()
        assert info.n_slots >= 8 * info.max_model_len
        params = SamplingParams(
            max_new_tokens=24, ignore_eos=True, temperature=100.0, top_p=0.99, repetition_penalty=1.1, logprobs=20,
            seed=1,
        )  # fmt: skip
        longest = [[3 + (i + j) % 250 for j in range(info.max_model_len - 24)] for i in range(16)]
        assert all(len(result.token_ids) == 24 for result in engine.generate(longest, params))


def test_too_little_memory_is_an_error_with_numbers(folder: Path) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        Engine(config(folder, n_slots=10**9)).start()
    assert 0 <= caught.value.available_bytes < caught.value.needed_bytes
