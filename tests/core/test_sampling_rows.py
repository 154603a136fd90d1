"""The sampler row by row: changes of the logits, unsound rows, log-probabilities, and what batches must not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from orca_core.sampling import SampledToken, SamplingRow, uniform
from orca_core.sampling.changes import Changes
from orca_core.staging import Upload
from tests.core.native_rig import kernels_or_skip
from tests.core.sampling_rows import INF, VOCAB, Way, kept, one, random_logits, row, sample

# ---- penalties, bias, ban


@pytest.fixture(params=["torch", "kernels"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both ways to draw on a CPU."""
    Way.kernels = kernels_or_skip() if request.param == "kernels" else None
    yield
    Way.kernels = None


def after(logits: torch.Tensor, r: SamplingRow) -> torch.Tensor:
    upload = Upload(logits.device)
    changes = Changes([r], logits.shape[-1], upload)
    upload.send()
    return changes.apply(logits)


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


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_a_change_does_not_hide_what_is_unsound(bad: float) -> None:
    """A ban puts -inf where the bad value was, and a penalty caps an infinite one: the model is broken all the same."""
    logits = torch.tensor([[1.0, bad, 0.0]])
    assert not one(logits, row(banned=frozenset({1}), min_new_tokens=1)).ok
    assert not one(logits, row(prompt=[1], repetition_penalty=2.0)).ok


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_nothing_left_to_choose_is_unsound(params: dict[str, float]) -> None:
    logits = torch.full((1, 5), -INF)
    assert not one(logits, row(**params)).ok
    logits[0, 2] = 1.0
    assert one(logits, row(**params)) == SampledToken(2)
    assert not one(logits, row(banned=frozenset({2}), min_new_tokens=1, **params)).ok


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
def test_a_repetition_penalty_near_zero_overflows_nothing(params: dict[str, float]) -> None:
    logits = torch.tensor([[8.0, 9.0, -1.0, 0.0]])
    token = one(logits, row(prompt=[0, 2], repetition_penalty=1e-60, **params))
    assert token == SampledToken(0)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
@pytest.mark.parametrize("penalty", [1e-60, 1e-40, 100.0])
def test_a_penalty_on_a_token_the_model_rules_out(penalty: float, params: dict[str, float]) -> None:
    """A padded head has logits of -inf, and -inf times a penalty that rounds to 0 would be NaN."""
    logits = torch.tensor([[0.0, -INF, 30.0, -INF]])
    changed = after(logits, row(prompt=[1], output=[3], repetition_penalty=penalty))
    assert torch.equal(changed, logits)
    assert one(logits, row(prompt=[1], output=[3], repetition_penalty=penalty, seed=3, **params)) == SampledToken(2)


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
