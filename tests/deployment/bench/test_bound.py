"""Schedules in virtual time, against cases done by hand and against the engine's own schedulers."""

from __future__ import annotations

import random

import pytest

from deployment.bench.bound import IterationCost, bound_of, packed_rows, rows_by_iteration
from deployment.bench.workloads import Shape, shapes_of
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.scheduler import Scheduler
from orca_core.static_policy import StaticScheduler
from tests.core.builders import make_state


def test_a_cost_is_the_median_of_its_rows_and_linear_between() -> None:
    cost = IterationCost([(1, 9.0), (1, 1.0), (1, 2.0), (5, 10.0), (3, 4.0)])
    assert (cost.rows, cost.seconds, cost.counts) == ([1, 3, 5], [2.0, 4.0, 10.0], [3, 1, 1])
    assert [cost(1), cost(2), cost(3), cost(4), cost(5)] == [2, 3, 4, 7, 10]
    assert [cost(7), cost(0)] == [14, 0]  # beyond: 2 a row, as from 1 to 5
    assert cost.total([1, 1, 5]) == 14
    assert IterationCost([(4, 1.5)])(100) == 1.5


MIX = [Shape(2, 1), Shape(3, 3), Shape(2, 2)]


def test_request_level_by_hand() -> None:
    # both prompts; the long one alone, twice; then the third, prompt and one increment
    assert rows_by_iteration(MIX, 2, 100, joins=False) == [5, 1, 1, 2, 1]


def test_iteration_level_by_hand() -> None:
    # both prompts; one increment beside the third's prompt; one increment each
    assert rows_by_iteration(MIX, 2, 100, joins=True) == [5, 3, 2]


def test_prompts_in_pieces_by_hand() -> None:
    shapes = [Shape(4, 2), Shape(6, 1)]
    assert rows_by_iteration(shapes, 2, 4, joins=False) == [4, 4, 3]
    assert rows_by_iteration(shapes, 2, 4, joins=True) == [4, 4, 3]


@pytest.mark.parametrize(
    ("shapes", "batch", "rows"),
    [
        (MIX, 2, [4, 3, 3]),  # 6 tokens in 3 iterations of 2; the prompts' other 2 + 1 + 1 rows on top
        ([Shape(1, 3), Shape(1, 1)], 2, [2, 1, 1]),  # the longest needs 3 iterations whatever is done
        ([Shape(1, 8)], 1, [1] * 8),
        ([Shape(1, 3), Shape(1, 3), Shape(1, 2)], 3, [3, 3, 2]),
        ([Shape(5, 1), Shape(3, 1), Shape(1, 1)], 4, [3 + 4 + 2]),
    ],
)
def test_packing_by_hand(shapes: list[Shape], batch: int, rows: list[int]) -> None:
    assert packed_rows(shapes, batch) == rows


def test_prompts_packed_together() -> None:
    shapes = [Shape(9, 2), Shape(5, 2), Shape(3, 2)]
    assert packed_rows(shapes, 3) == [3 + 8 + 2, 3 + 4]  # the third goes round to the first again
    assert packed_rows(shapes, 3, 2) == [3 + 8 + 4, 3 + 2]


def test_the_bound_of_the_mix_is_60_percent_before_initiation_costs() -> None:
    bound = bound_of(shapes_of("short_long_mix", 16), 2, 10_000, IterationCost([(1, 1.0)]))
    assert (bound.static_s, bound.ideal_s) == (1024, 640)
    assert bound.ideal == pytest.approx(1.6)
    # in arrival order the last long request runs its last 64 iterations alone
    assert bound.arrival_order_s == 672
    assert bound.arrival_order == pytest.approx(1024 / 672)


def test_requests_of_one_size_gain_nothing() -> None:
    bound = bound_of(shapes_of("equal_size", 16), 2, 512, IterationCost([(1, 1.0)]))
    assert bound.static_s == bound.arrival_order_s == bound.ideal_s == 1024


@pytest.mark.parametrize("seed", range(30))
def test_the_ideal_is_a_bound_and_virtual_schedules_are_the_schedulers_own(seed: int) -> None:
    chance = random.Random(seed)
    shapes = [Shape(chance.randint(1, 12), chance.randint(1, 9)) for _ in range(chance.randint(1, 12))]
    batch = chance.randint(1, 5)
    budget = chance.randint(batch, 20)
    for scheduler, joins in ((Scheduler(batch, budget), True), (StaticScheduler(batch, budget), False)):
        assert rows_by_iteration(shapes, batch, budget, joins=joins) == run(scheduler, shapes, batch)
    slope = chance.random()
    bound = bound_of(shapes, batch, budget, IterationCost([(1, 1.0), (2, 1.0 + slope)]))
    assert bound.ideal_s <= bound.arrival_order_s + 1e-9
    assert bound.ideal_s <= bound.static_s + 1e-9


def run(scheduler: Scheduler, shapes: list[Shape], batch: int) -> list[int]:
    """Rows of each iteration that a real scheduler chooses, with slots for all."""
    pool, kv = RequestPool(), KVManager(10_000, 4, batch)
    for shape in shapes:
        pool.add(make_state(shape.n_prompt_tokens, shape.new_tokens))
    rows = []
    while pool:
        selection = scheduler.select(pool, kv, 0.0)
        rows.append(sum(item.n_tokens for item in selection.chosen))
        for item in selection.chosen:
            request = item.request
            request.advance(item.n_tokens)
            if request.n_uncomputed == 0:
                request.append(7, 0.0)
            if request.n_output_tokens == request.spec.max_new_tokens:
                kv.release(request.request_id)
                pool.finish(request)
    return rows
