"""Draws and log-probabilities of the kernels against those in torch, over vocabularies of real size.

What they mean is tested with both of them in ``tests/core/test_sampling.py`` and ``test_sampling_rows.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from orca_core.kernels import DRAW, Kernels
from orca_core.sampling import SampledToken, sample
from tests.core.native_rig import every_variant, variant_or_skip
from tests.core.sampling_rows import random_logits, row

FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.6, "top_k": 40},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.05}, {"temperature": 100.0},
    {"temperature": 100.0, "top_p": 0.99}, {"temperature": 1e-4, "top_p": 0.5}, {"temperature": 1.0, "top_k": 5000},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02, "top_k": 100, "repetition_penalty": 1.3},
)  # fmt: skip


@pytest.fixture(scope="module", params=every_variant())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant_or_skip(request.param)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1023, 1024, 1025, 49152, 151_936])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_the_same_tokens_as_torch(kernels: Kernels, vocab: int, scale: float) -> None:
    rows = [row(seed=i, position=7 * i, prompt=[0], **params) for i, params in enumerate(FILTERS)]
    for seed in range(1 if vocab > 100_000 else 4):
        logits = random_logits(len(rows), vocab, seed, scale)
        if seed % 2:
            logits = logits.round()  # many equal ones
        assert sample(logits, rows, kernels) == sample(logits, rows)


def test_they_do_not_depend_on_threads(kernels: Kernels) -> None:
    rows = [row(seed=i, temperature=1.0, top_p=0.9) for i in range(9)]
    logits, n_threads = random_logits(9, 5000), torch.get_num_threads()
    found = []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found.append(sample(logits, rows, kernels))
    finally:
        torch.set_num_threads(n_threads)
    assert found[0] == found[1] == found[2]


def test_what_is_not_sound_is_told_and_disturbs_nobody(kernels: Kernels) -> None:
    logits = random_logits(5, 100)
    logits[0, 99], logits[1] = float("nan"), -float("inf")
    logits[2, 3], logits[3, 50] = float("inf"), -float("inf")
    tokens = sample(logits, [row(temperature=1.0, logprobs=3)] * 5, kernels)
    assert [token.ok for token in tokens] == [False, False, False, True, True]
    assert tokens[4] == sample(logits[4:], [row(temperature=1.0, logprobs=3)], kernels)[0]


@pytest.mark.parametrize("n_top", [0, 1, 20])
def test_log_probabilities_are_those_of_a_log_softmax(kernels: Kernels, n_top: int) -> None:
    logits = random_logits(6, 49152, scale=4.0)
    chosen = logits.argmax(-1) + torch.tensor([0, 0, 0, 1, 1, 1])
    at_chosen, ids, values = kernels.logprobs(logits, chosen, n_top)
    oracle = torch.log_softmax(logits.double(), -1)
    best = oracle.topk(n_top, -1)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values.double(), best.values, rtol=0, atol=2e-6)
    torch.testing.assert_close(at_chosen.double(), oracle.gather(-1, chosen[:, None])[:, 0], rtol=0, atol=4e-6)


LOGITS = random_logits(2, 10)
WRONG: dict[str, Callable[[Kernels], object]] = {
    "dtype": lambda kernels: kernels.sample(LOGITS.double(), np.zeros(2, DRAW)),
    "strides": lambda kernels: kernels.sample(LOGITS.T.contiguous().T, np.zeros(2, DRAW)),
    "too few draws": lambda kernels: kernels.sample(LOGITS, np.zeros(1, DRAW)),
    "other draws": lambda kernels: kernels.sample(LOGITS, np.zeros(2)),
    "chosen": lambda kernels: kernels.logprobs(LOGITS, torch.tensor([0, 10]), 1),
    "n_top": lambda kernels: kernels.logprobs(LOGITS, torch.tensor([0, 1]), 11),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_does_not_fit_is_refused(kernels: Kernels, what: str) -> None:
    with pytest.raises(ValueError, match=r"logits|chosen"):
        WRONG[what](kernels)


def test_no_rows(kernels: Kernels) -> None:
    assert sample(torch.empty(0, 10), [], kernels) == []
    assert sample(random_logits(1, 10), [row(temperature=1.0)], kernels)[0] != SampledToken(0, ok=False)
