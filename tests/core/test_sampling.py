"""The sampler against transformers' warpers and against the distribution it claims."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from orca_core.sampling import GREEDY_BELOW, SampledToken, uniform
from orca_core.sampling import draw as draw_module
from tests.core.native_rig import kernels_or_skip
from tests.core.sampling_rows import INF, VOCAB, Way, draws, kept, one, random_logits, row, sample

# ---- greedy


@pytest.fixture(params=["torch", "kernels"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both ways to draw on a CPU."""
    Way.kernels = kernels_or_skip() if request.param == "kernels" else None
    yield
    Way.kernels = None


def test_greedy_is_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert one(logits, row()) == SampledToken(1)
    assert one(logits, row(temperature=GREEDY_BELOW / 2, seed=5)) == SampledToken(1)


def test_logits_are_not_modified() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [row(temperature=0.7, top_p=0.5), row(logit_bias={3: 5.0}, presence_penalty=1.0, output=[1])])
    assert torch.equal(logits, before)


class Operations(TorchDispatchMode):
    """Names of the operations that read or write a whole ``[n, vocab]`` tensor."""

    def __init__(self, n_elements: int) -> None:
        super().__init__()
        self._n_elements = n_elements
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.numel() >= self._n_elements for x in (*args, out)):
            self.names.append(func.overloadpacket.__name__)
        return out


def test_a_greedy_batch_is_an_argmax_and_no_more() -> None:
    """No sort, no copy, no softmax: whatever reads all logits is the argmax, a lookup at its result, or a view."""
    logits = random_logits(8, 1000)
    with Operations(logits.numel()) as operations:
        tokens = sample(logits, [row()] * 8)
    assert [token.token_id for token in tokens] == logits.argmax(dim=-1).tolist()
    assert set(operations.names) <= {"argmax", "gather", "select", "detach"}


# ---- the distribution


def chi_square(counts: Counter[int], probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; tokens expected fewer than 5 times are one bin."""
    n = sum(counts.values())
    expected = {i: p * n for i, p in enumerate(probs.tolist())}
    assert all(expected[i] > 0 for i in counts), "drew a token of probability 0"
    common = [i for i, e in expected.items() if e >= 5]
    pairs = [(counts[i], expected[i]) for i in common]
    rest = n - sum(e for _, e in pairs)
    if rest >= 5:
        pairs.append((n - sum(c for c, _ in pairs), rest))
    return sum((c - e) ** 2 / e for c, e in pairs), len(pairs) - 1


def oracle_probs(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """By the warpers of transformers, in the documented order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if params.get("top_k"):
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p"):
        warpers.append(MinPLogitsWarper(params["min_p"]))
    return torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.int64), logits), dim=-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 3, "top_p": 0.99},
    ],
)
def test_draws_follow_the_distribution_of_transformers(params: dict[str, float]) -> None:
    logits = random_logits(seed=3)
    probs = oracle_probs(logits, **params)
    statistic, freedom = chi_square(draws(logits, 20_000, **params), probs)
    # five standard deviations of the chi-square distribution; the seeds are fixed, so it holds or it does not
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.3, 3.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_what_is_kept_is_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    logits = random_logits(seed=seed, scale=1.0)
    probs = oracle_probs(logits, **params)
    support = set(probs.nonzero().squeeze(-1).tolist())
    found = kept(logits, 400, **params)
    # the last token of a nucleus may fall on either side of the rounding of a float32 sum
    assert len(found - support) <= 1
    likely = {i for i in support if probs[i] > 0.06}  # 400 draws miss one of them once in 5e10 times
    assert likely <= found


def test_inverse_of_the_cumulative_distribution_at_the_hash_of_seed_and_position() -> None:
    logits = random_logits(seed=5)
    cumulative = torch.softmax(logits[0].double(), dim=-1).cumsum(dim=-1)
    for position in range(200):
        expected = int(torch.searchsorted(cumulative, uniform(99, position), right=True))
        assert one(logits, row(seed=99, position=position, temperature=1.0)).token_id == expected


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 1e-6}])
@pytest.mark.parametrize(("point", "expected"), [(0.0, 1), (1.0 - 2.0**-53, 3)])
def test_the_ends_of_the_distribution(
    params: dict[str, float], point: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither end may fall on a token that cannot be."""
    monkeypatch.setattr(draw_module, "uniform", lambda *_: point)
    logits = torch.tensor([[-INF, 2.0, -INF, 1.9, -INF]])
    assert one(logits, row(temperature=1.0, **params)).token_id == expected


def test_uniform_is_uniform_and_independent_of_neighbours() -> None:
    values = [uniform(seed, position) for seed in range(64) for position in range(64)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(values)
    counts = Counter(int(value * 16) for value in values)
    statistic, freedom = chi_square(counts, torch.full((16,), 1 / 16))
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    lag = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(values)) / len(values)
    assert abs(lag) < 5 / 12 / math.sqrt(len(values))
    # a request that is resumed by another version of this must draw the same numbers
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(42, 7) == 0.08603176010658542
    assert uniform(2**64 - 1, 2**31) == 0.5032316411401221
    assert draw_module._mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0, as published
    assert uniform(2**64 - 1, 12345) != uniform(2**64 - 2, 12345)


# ---- filters at their limits


def test_flat_distribution_keeps_exactly_what_was_asked_for() -> None:
    """Of equal tokens the lowest ids are kept, so that top_k=1 is greedy also then."""
    flat = torch.zeros(1, 10)
    assert kept(flat, 500, temperature=1.0, top_k=1) == {0}
    assert kept(flat, 500, temperature=1.0, top_k=3) == {0, 1, 2}
    assert kept(flat, 500, temperature=1.0, top_p=0.35) == {0, 1, 2, 3}
    assert kept(flat[:, :4], 500, temperature=1.0, top_p=0.5) == {0, 1}  # reached exactly: no third one
    assert kept(flat, 500, temperature=1.0, top_p=1e-9) == {0}
    assert kept(flat, 500, temperature=1.0, min_p=1.0) == set(range(10))


def test_equal_tokens_among_others() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 3.0, 2.0, 1.0]])
    assert kept(logits, 500, temperature=1.0, top_k=2) == {1, 3}
    assert kept(logits, 500, temperature=1.0, top_k=4) == {0, 1, 3, 4}


@pytest.mark.parametrize("vocab", [50, 5000])
def test_tiny_filters_are_greedy(vocab: int) -> None:
    logits = random_logits(vocab=vocab, seed=11)
    best = int(logits.argmax())
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 2**31 - 1, "top_p": 1e-9}):
        assert kept(logits, 100, temperature=1.0, **params) == {best}


def test_nucleus_larger_than_the_prefix_that_is_looked_at_first() -> None:
    logits = random_logits(vocab=6000, seed=2, scale=0.1)
    probs = oracle_probs(logits, top_p=0.9)
    assert (probs > 0).sum() > 4000
    found = draws(logits, 600, temperature=1.0, top_p=0.9)
    assert len([i for i in found if probs[i] == 0]) <= 1
    mean = sum(i * n for i, n in found.items()) / 600
    assert abs(mean - float((probs * torch.arange(6000)).sum())) < 5 * 6000 / math.sqrt(12 * 600)


def test_extreme_temperatures() -> None:
    logits = random_logits(seed=1, scale=50.0)
    assert kept(logits, 50, temperature=1e-4) == {int(logits.argmax())}
    assert len(kept(random_logits(seed=1), 2000, temperature=100.0)) == VOCAB
    assert len(kept(logits * 1e30, 20, temperature=0.5)) == 1
