"""The loop, whatever comes: random arrivals, lengths, shared beginnings, cancels, deadlines and faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_core.errors import DeadlineExceededError, InternalError, RequestCancelledError
from orca_core.request import Request
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, GenerationRequest
from tests.core.fakes import next_token
from tests.core.loop_bench import LoopBench

N_SLOTS, BLOCK_SIZE = 80, 4
MAX_BATCH_TOKENS = 12
PREFIXES = [list(range(10, 34)), list(range(10, 20)) + list(range(100, 120)), [10] * 20, []]


@dataclass
class Plan:
    """One request of a run. ``at``: the turn it arrives in; ``cancel_at``: turns after that."""

    name: str
    at: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    cancel_at: int | None = None
    timeout_s: float | None = None
    broken: bool = False

    @property
    def spec(self) -> GenerationRequest:
        return GenerationRequest(self.name, self.token_ids, self.max_new_tokens, 0, timeout_s=self.timeout_s)


def reference(token_ids: tuple[int, ...], n: int) -> list[int]:
    """What the fake executor says for a prompt, alone."""
    request = Request(GenerationRequest("alone", token_ids, n, 0), 0.0)
    for _ in range(n):
        request.token_ids.append(next_token(request))
    return request.token_ids[len(token_ids) :]


def draw_plan(rng: random.Random, number: int, at: int, faults: float, longest: int = 10) -> Plan:
    prefix = rng.choice(PREFIXES)
    ids = prefix[: rng.randint(0, len(prefix))] + [rng.randrange(10, 14) for _ in range(rng.randint(1, 6))]
    fate = rng.random()
    return Plan(
        f"r{number}", at, tuple(ids), rng.randint(1, longest),
        cancel_at=rng.randrange(12) if fate < faults else None,
        timeout_s=rng.uniform(0.5, 20.0) if faults <= fate < 2 * faults else None,
        broken=2 * faults <= fate < 2.5 * faults,
    )  # fmt: skip


def play(bench: LoopBench, plans: list[Plan], *, audit: bool = True) -> int:
    """Run them to the end, looking at the books in each turn; how many turns it took."""
    arrivals: dict[int, list[Plan]] = {}
    cancels: dict[int, list[str]] = {}
    for plan in plans:
        arrivals.setdefault(plan.at, []).append(plan)
        if plan.cancel_at is not None:
            cancels.setdefault(plan.at + plan.cancel_at, []).append(plan.name)
        if plan.broken:
            bench.executor.broken.add(plan.name)
    turn, last = 0, max([*arrivals, *cancels], default=0)
    while turn <= last or not bench.loop.idle:
        for plan in arrivals.get(turn, ()):
            bench.submit(plan.spec)
        for name in cancels.get(turn, ()):
            bench.loop.cancel(name)
        rows = bench.turn()
        assert sum(n for _, n in rows) <= bench.scheduler.max_batch_tokens
        assert bench.kv.used_slots <= bench.kv.reserved_slots <= bench.kv.n_slots
        if audit:
            bench.kv.check_integrity()
            bench.loop._pool.check_integrity()
        turn += 1
        assert turn < last + 100 * len(plans) + 100, "no end in sight"
    return turn


def check_ends(bench: LoopBench, plans: list[Plan], *, iterations_fail: bool) -> None:
    """Everybody ended once, with what a run alone gives, or its beginning and an error there is a reason for."""
    assert bench.executor.wrong == []
    assert bench.ended == {plan.name: 1 for plan in plans}
    for plan in plans:
        said, error = bench.outcome(plan.name)
        wanted = reference(plan.token_ids, plan.max_new_tokens)
        if error is None:
            assert not plan.broken
            assert (list(said.token_ids), said.finish_reason) == (wanted, FinishReason.LENGTH)
            assert said.usage is not None
            assert said.usage.prompt_tokens == len(plan.token_ids) > said.usage.cached_prompt_tokens
        else:
            assert list(said.token_ids) == wanted[: len(said.token_ids)]
            assert len(said.token_ids) < plan.max_new_tokens
            assert (
                (isinstance(error, RequestCancelledError) and plan.cancel_at is not None)
                or (isinstance(error, DeadlineExceededError) and plan.timeout_s is not None)
                or (isinstance(error, InternalError) and (plan.broken or iterations_fail))
            )
    load = bench.loop.load()
    assert (load.reserved_slots, load.used_slots, load.queued_slots, load.waiting, load.running) == (0, 0, 0, 0, 0)
    assert load.headroom == load.n_slots
    bench.kv.check_integrity(idle=True)


def first_seen(bench: LoopBench) -> list[int]:
    """Numbers of the requests in the order of their first rows, which is that of admission."""
    return [int(name[1:]) for name in dict.fromkeys(name for batch in bench.executor.batches for name, _ in batch)]


def make_bench(tokenizer: Tokenizer, **options: object) -> LoopBench:
    settings = {"n_slots": N_SLOTS, "block_size": BLOCK_SIZE, "max_batch_tokens": MAX_BATCH_TOKENS, **options}
    return LoopBench(tokenizer, **settings)  # type: ignore[arg-type]


@settings(max_examples=120, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    gaps=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    faults=st.sampled_from([0.0, 0.15, 0.3]),
    fail_at=st.sets(st.integers(0, 60).map(lambda n: 2 * n), max_size=4),
    prefix_cache=st.booleans(),
    overtaking_s=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_whatever_comes(
    tokenizer: Tokenizer, rng: random.Random, gaps: list[int], faults: float, fail_at: set[int], prefix_cache: bool,
    overtaking_s: float,
) -> None:  # fmt: skip
    bench = make_bench(
        tokenizer, fail_at=fail_at, prefix_cache=prefix_cache, overtaking_s=overtaking_s, max_overtakers=3
    )
    plans, at = [], 0
    for number, gap in enumerate(gaps):
        at += gap
        plans.append(draw_plan(rng, number, at, faults))
    play(bench, plans)
    check_ends(bench, plans, iterations_fail=bool(fail_at))
    order = first_seen(bench)
    if not overtaking_s:
        assert order == sorted(order)
    if not prefix_cache:
        assert bench.loop.load().cached_prompt_tokens == 0


def test_ten_thousand_requests(tokenizer: Tokenizer) -> None:
    """Half of the line is there from the start: neither a turn nor an end may cost more for a long line."""
    rng = random.Random(11)
    plans = [draw_plan(rng, number, max(0, number - 5_000), 0.05, longest=5) for number in range(10_000)]
    bench = make_bench(tokenizer, n_slots=300, max_batch_size=16, max_batch_tokens=64)
    play(bench, plans, audit=False)
    check_ends(bench, plans, iterations_fail=False)
    order = first_seen(bench)
    assert order == sorted(order)
    load = bench.loop.load()
    assert load.prompt_tokens > load.cached_prompt_tokens > 0.2 * load.prompt_tokens


@pytest.mark.parametrize("n_prompt", [1, 4, 5, 8, 9])
def test_all_but_the_last_token_of_a_known_prompt_is_cached(tokenizer: Tokenizer, n_prompt: int) -> None:
    bench = make_bench(tokenizer)
    for name in ("first", "second"):
        bench.submit(GenerationRequest(name, tuple(range(10, 10 + n_prompt)), 3, 0))
        bench.run()
    first, second = (bench.outcome(name)[0] for name in ("first", "second"))
    assert first.token_ids == second.token_ids
    assert first.usage is not None
    assert second.usage is not None
    assert (first.usage.cached_prompt_tokens, second.usage.cached_prompt_tokens) == (0, (n_prompt - 1) // 4 * 4)
    assert bench.loop.load().cached_prompt_tokens == (n_prompt - 1) // 4 * 4
