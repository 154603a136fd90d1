"""Request-level scheduling: nobody joins a batch, and the next one is formed when its last member has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orca_core.errors import DeadlineExceededError, InternalError, RequestCancelledError, RequestTooLargeError
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request, RequestState
from orca_core.scheduler import Selection
from orca_core.static_policy import StaticScheduler
from orca_core.tokenizer import Tokenizer
from tests.core.builders import make_spec, make_state
from tests.core.engine_bench import Bench, ids_of


def setup(
    n_slots: int = 64, max_batch_size: int = 2, max_batch_tokens: int = 32
) -> tuple[StaticScheduler, RequestPool, KVManager]:
    return StaticScheduler(max_batch_size, max_batch_tokens), RequestPool(), KVManager(n_slots, 4, max_batch_size)


def add(pool: RequestPool, *sizes: tuple[int, int]) -> list[Request]:
    requests = [make_state(*size) for size in sizes]
    for request in requests:
        pool.add(request)
    return requests


def turn(scheduler: StaticScheduler, pool: RequestPool, kv: KVManager) -> list[tuple[Request, int]]:
    """One iteration without a model; requests that are complete leave."""
    selection: Selection = scheduler.select(pool, kv, 0.0)
    for item in selection.chosen:
        kv.extend(item.request.request_id, item.n_tokens)
        item.request.advance(item.n_tokens)
        if item.request.n_uncomputed == 0:
            item.request.append(7, 0.0)
        if item.request.n_output_tokens == item.request.spec.max_new_tokens:
            kv.release(item.request.request_id)
            pool.finish(item.request)
    return [(item.request, item.n_tokens) for item in selection.chosen]


def test_nobody_joins_until_the_longest_member_has_ended() -> None:
    scheduler, pool, kv = setup()
    short, long, third, fourth = add(pool, (3, 1), (3, 3), (2, 1), (2, 1))
    assert turn(scheduler, pool, kv) == [(short, 3), (long, 3)]
    assert (short.state, kv.reserved_slots) == (RequestState.FINISHED, long.total_tokens)
    for _ in range(2):  # a place is empty, and stays so
        assert turn(scheduler, pool, kv) == [(long, 1)]
        assert third.state is RequestState.WAITING
    assert turn(scheduler, pool, kv) == [(third, 2), (fourth, 2)]
    assert (len(pool), kv.reserved_slots) == (0, 0)


def test_a_latecomer_finds_the_door_shut_though_there_is_room() -> None:
    scheduler, pool, kv = setup(max_batch_size=4)
    (alone,) = add(pool, (3, 2))
    turn(scheduler, pool, kv)
    (late,) = add(pool, (1, 1))
    assert turn(scheduler, pool, kv) == [(alone, 1)]
    assert turn(scheduler, pool, kv) == [(late, 1)]


def test_a_batch_holds_only_demands_that_fit_together_in_arrival_order() -> None:
    scheduler, pool, kv = setup(n_slots=12, max_batch_size=4)
    a, b, c, d = add(pool, (3, 2), (3, 2), (3, 2), (1, 1))
    assert turn(scheduler, pool, kv) == [(a, 3), (b, 3)]
    assert d.state is RequestState.WAITING  # it would fit, but does not overtake
    turn(scheduler, pool, kv)
    assert turn(scheduler, pool, kv) == [(c, 3), (d, 1)]


def test_prompts_beyond_the_rows_of_an_iteration_join_all_the_same() -> None:
    scheduler, pool, kv = setup(max_batch_tokens=4)
    a, b = add(pool, (4, 2), (6, 1))
    assert turn(scheduler, pool, kv) == [(a, 4)]
    assert b.state is RequestState.RUNNING
    assert turn(scheduler, pool, kv) == [(a, 1), (b, 3)]
    assert turn(scheduler, pool, kv) == [(b, 3)]


def test_one_that_can_never_fit_fails_alone() -> None:
    scheduler, pool, kv = setup(n_slots=10)
    big, small = add(pool, (8, 8), (2, 2))
    selection = scheduler.select(pool, kv, 0.0)
    assert [item.request for item in selection.chosen] == [small]
    ((rejected, error),) = selection.rejected
    assert rejected is big
    assert isinstance(error, RequestTooLargeError)


def test_an_empty_pool_gives_an_empty_selection() -> None:
    scheduler, pool, kv = setup()
    assert scheduler.select(pool, kv, 0.0) == Selection()


# ---- in an engine


@pytest.fixture
def static(tokenizer: Tokenizer) -> Iterator[Bench]:
    made = Bench(tokenizer, StaticScheduler, max_batch_size=2)
    made.engine.start()
    yield made
    made.executor.let_go()
    made.engine.close()


def names(bench: Bench) -> list[list[str]]:
    return [[request_id for request_id, _ in batch] for batch in bench.executor.batches]


def submit(bench: Bench, **sizes: int) -> dict[str, object]:
    specs = [make_spec(3, n, request_id=name) for name, n in sizes.items()]
    return dict(zip(sizes, bench.engine.submit_all(specs), strict=True))


def test_an_engine_runs_batch_after_batch_with_the_tokens_of_iteration_level_scheduling(static: Bench) -> None:
    channels = submit(static, a=1, b=4, c=2)
    tokens = {name: ids_of(channel) for name, channel in channels.items()}
    static.assert_idle()
    assert names(static) == [["a", "b"], ["b"], ["b"], ["b"], ["c"], ["c"]]
    assert [len(ids) for ids in tokens.values()] == [1, 4, 2]
    assert tokens["c"] == tokens["b"][:2]  # the same prompt, alone or beside another


def test_a_cancelled_member_leaves_and_the_others_go_on_alone(static: Bench) -> None:
    static.executor.hold()
    channels = submit(static, a=50, b=3, c=1)
    static.executor.step()
    static.wait_for(lambda load: load.iterations == 1)
    static.engine.cancel("a")
    static.executor.let_go()
    with pytest.raises(RequestCancelledError):
        ids_of(channels["a"])
    assert len(ids_of(channels["b"])) == 3
    assert len(ids_of(channels["c"])) == 1
    static.assert_idle()
    without_a = names(static)[-3:]
    assert without_a[-1] == ["c"]
    assert ["a", "c"] not in names(static)


def test_a_deadline_inside_a_batch_ends_its_member_and_the_batch_with_it(static: Bench) -> None:
    static.executor.hold()
    first = make_spec(3, 50, request_id="a", timeout_s=5.0)
    a, b = static.engine.submit_all([first, make_spec(3, 50, request_id="b", timeout_s=5.0)])
    (c,) = static.engine.submit_all([make_spec(3, 1, request_id="c")])
    static.executor.step()
    static.wait_for(lambda load: load.iterations == 1)
    static.clock.now += 6.0
    static.executor.let_go()
    for channel in (a, b):
        with pytest.raises(DeadlineExceededError):
            ids_of(channel)
    assert len(ids_of(c)) == 1
    static.assert_idle()


def test_a_failed_iteration_ends_the_batch_and_the_next_one_is_formed(static: Bench) -> None:
    static.executor.errors = [RuntimeError("device")]
    channels = submit(static, a=2, b=2, c=2)
    for name in ("a", "b"):
        with pytest.raises(InternalError):
            ids_of(channels[name])
    assert len(ids_of(channels["c"])) == 2
    static.assert_idle()
