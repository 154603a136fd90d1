"""The sampler against transformers' processors, against the distribution it claims, and against itself in batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from orca_core.params import SamplingParams
from orca_core.sampling import GREEDY_BELOW, SampledToken, SamplingRow, sample, uniform
from orca_core.sampling import draw as draw_module
from orca_core.sampling.changes import apply_changes

VOCAB = 61
INF = float("inf")


def random_logits(n: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(
    seed: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: frozenset[int] = frozenset(),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, position, prompt, output, banned)


def one(logits: torch.Tensor, r: SamplingRow) -> SampledToken:
    (token,) = sample(logits, [r])
    return token


def draws(logits: torch.Tensor, n: int, **params: Any) -> Counter[int]:
    """Tokens of n positions that all have the same logits ``[1, vocab]``."""
    rows = [row(seed=7, position=position, **params) for position in range(n)]
    return Counter(token.token_id for token in sample(logits.expand(n, -1), rows))


# ---- greedy


def test_greedy_is_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert one(logits, row()) == SampledToken(1)
    assert one(logits, row(temperature=GREEDY_BELOW / 2, seed=5)) == SampledToken(1)


def test_logits_are_not_modified() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [row(temperature=0.7, top_p=0.5), row(logit_bias={3: 5.0}, presence_penalty=1.0, output=[1])])
    assert torch.equal(logits, before)


def test_a_greedy_batch_is_an_argmax_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "topk", "softmax", "cumsum", "log_softmax", "searchsorted"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("work nobody asked for"))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: pytest.fail("a copy nobody asked for"))
    logits = random_logits(8)
    assert [token.token_id for token in sample(logits, [row()] * 8)] == logits.argmax(dim=-1).tolist()


# ---- the distribution


def kept(logits: torch.Tensor, n: int = 3000, **params: Any) -> set[int]:
    return set(draws(logits, n, **params))


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
    assert draw_module._mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0, as published
    assert uniform(2**64 - 1, 12345) != uniform(2**64 - 2, 12345)


# ---- filters at their limits


def test_flat_distribution_keeps_exactly_what_was_asked_for() -> None:
    """Of equal tokens the lowest ids are kept, so that top_k=1 is greedy also then."""
    flat = torch.zeros(1, 10)
    assert kept(flat, 500, temperature=1.0, top_k=1) == {0}
    assert kept(flat, 500, temperature=1.0, top_k=3) == {0, 1, 2}
    assert kept(flat, 500, temperature=1.0, top_p=0.35) == {0, 1, 2, 3}
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


# ---- penalties, bias, ban


def after(logits: torch.Tensor, r: SamplingRow) -> torch.Tensor:
    return apply_changes(logits, [r])


def test_repetition_penalty_as_in_transformers() -> None:
    logits = random_logits(seed=4)
    prompt, output = [3, 5, 5, 60], [7, 3, 9]
    for penalty in (0.5, 1.3, 5.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
        assert torch.equal(after(logits, row(prompt=prompt, output=output, repetition_penalty=penalty)), expected), (
            penalty
        )


def test_presence_and_frequency_penalty_count_the_output_alone() -> None:
    logits = random_logits(seed=4)
    changed = after(logits, row(prompt=[1, 2], output=[5, 5, 5, 6], presence_penalty=0.5, frequency_penalty=0.25))
    expected = logits.clone()
    expected[0, 5] -= 0.5 + 3 * 0.25
    expected[0, 6] -= 0.5 + 0.25
    torch.testing.assert_close(changed, expected)
    negative = after(logits, row(output=[5], presence_penalty=-2.0))
    assert negative[0, 5] == logits[0, 5] + 2


def test_penalties_come_before_temperature_and_filters() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0, 0.0]])
    assert kept(logits, 200, temperature=0.01, top_k=1, output=[0], presence_penalty=0.5) == {1}
    assert kept(logits, 200, temperature=0.5, top_k=1, logit_bias={3: 5.0}) == {3}
    # repetition first, then presence: 2 / 2 - 0.5, not (2 - 0.5) / 2
    changed = after(logits, row(output=[0], repetition_penalty=2.0, presence_penalty=0.5))
    assert changed[0, 0] == 0.5


def test_bias_at_its_limits() -> None:
    logits = random_logits(seed=6)
    worst, best = int(logits.argmin()), int(logits.argmax())
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
        assert one(logits, row(logit_bias={worst: 100.0}, **params)).token_id == worst
        assert one(logits, row(logit_bias={best: -100.0}, **params)).token_id != best
    all_but_one = {i: -100.0 for i in range(VOCAB) if i != 17}
    assert kept(logits, 100, temperature=1.0, logit_bias=all_but_one) == {17}


def test_ban_until_min_new_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]])
    banned = frozenset({0, 1})
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"logit_bias": {0: 100.0}}):
        assert one(logits, row(output=[2], banned=banned, min_new_tokens=2, **params)).token_id == 2
    assert one(logits, row(output=[2, 2], banned=banned, min_new_tokens=2)).token_id == 0


# ---- unsound rows


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_an_unsound_row_fails_alone(bad: float) -> None:
    logits = random_logits(5, seed=8)
    logits[0, 3] = logits[3, 60] = bad
    rows = [row(seed=i, temperature=t, top_p=p, logprobs=1) for i, (t, p) in enumerate(
        [(0.0, 1.0), (0.0, 1.0), (1.0, 0.9), (1.0, 0.9), (1.0, 1.0)]
    )]  # fmt: skip
    tokens = sample(logits, rows)
    assert [token.ok for token in tokens] == [False, True, True, False, True]
    assert tokens[0].logprobs is None
    for i in (1, 2, 4):
        assert tokens[i] == one(logits[i : i + 1], rows[i])


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_nothing_left_to_choose_is_unsound(params: dict[str, float]) -> None:
    logits = torch.full((1, 5), -INF)
    assert not one(logits, row(**params)).ok
    logits[0, 2] = 1.0
    assert one(logits, row(**params)) == SampledToken(2)
    assert not one(logits, row(banned=frozenset({2}), min_new_tokens=1, **params)).ok


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
def test_a_repetition_penalty_near_zero_overflows_nothing(params: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0, 0.0]])
    token = one(logits, row(prompt=[0, 2], repetition_penalty=1e-60, **params))
    assert token == SampledToken(0)


# ---- log-probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(seed=9)
    expected = torch.log_softmax(logits[0], dim=-1)
    token = one(logits, row(temperature=2.0, top_k=1, logit_bias={4: 100.0}, logprobs=5))
    assert token.token_id == 4
    assert token.logprobs is not None
    assert token.logprobs.chosen == (4, float(expected[4]))
    best = torch.topk(expected, 5)
    assert token.logprobs.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_only_askers_get_logprobs() -> None:
    """B18."""
    tokens = sample(random_logits(4), [row(), row(logprobs=0), row(temperature=1.0), row(logprobs=20)])
    assert [token.logprobs and len(token.logprobs.top) for token in tokens] == [None, 0, None, 20]


def test_equal_and_impossible_tokens_in_logprobs() -> None:
    """The best first, of equals the lowest id; nothing that JSON cannot say (C8)."""
    logits = torch.tensor([[0.0, 1.0, -INF, 1.0, 0.0, 1.0]])
    token = one(logits, row(logprobs=4))
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 3, 5, 0]
    token = one(logits, row(logprobs=20))
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 3, 5, 0, 4]
    assert all(math.isfinite(logprob) for _, logprob in token.logprobs.top)


# ---- batches


def test_a_seed_gives_the_same_tokens_and_another_one_others() -> None:
    logits = random_logits(seed=10, scale=1.0)

    def tokens(seed: int) -> list[int]:
        return [one(logits, row(seed=seed, position=p, temperature=1.0)).token_id for p in range(30)]

    torch.manual_seed(1)
    first = tokens(42)
    torch.manual_seed(2)
    assert tokens(42) == first
    assert tokens(43) != first
    assert len(set(first)) > 5  # positions differ among themselves


ids_ = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def rows_(draw: Callable[[Any], Any]) -> SamplingRow:
    return row(
        seed=draw(st.integers(0, 2**64 - 1)),
        position=draw(st.integers(0, 10_000)),
        prompt=draw(ids_),
        output=draw(ids_),
        banned=frozenset(draw(st.sampled_from([(), (1, 2)]))),
        min_new_tokens=draw(st.sampled_from([0, 3])),
        temperature=draw(st.sampled_from([0.0, 1e-4, 0.7, 1.0, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, 2000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        logit_bias=draw(st.sampled_from([{}, {}, {5: 3.0}])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@pytest.mark.parametrize("vocab", [VOCAB, 4099])
@settings(max_examples=150, deadline=None)
@given(rows=st.lists(rows_(), min_size=1, max_size=7), seed=st.integers(0, 1000), tied=st.booleans())
def test_a_row_does_not_depend_on_its_batch(vocab: int, rows: list[SamplingRow], seed: int, tied: bool) -> None:
    logits = random_logits(len(rows), vocab, seed)
    if tied:
        logits = logits.round()
    if seed % 5 == 0:
        logits[seed % len(rows), seed % vocab] = float("nan")
    together = sample(logits, rows)
    assert together == [one(logits[i : i + 1].clone(), r) for i, r in enumerate(rows)]
    order = sorted(range(len(rows)), key=lambda i: uniform(seed, i))
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
