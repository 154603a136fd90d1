"""Algorithm 1: first come, first served, with one reservation at admission."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orca_core.errors import RequestTooLargeError
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request, RequestState
from orca_core.scheduler import Scheduler, Selection
from tests.core.builders import make_state


def setup(
    n_slots: int = 64, max_batch_size: int = 4, max_batch_tokens: int = 32, **options: float
) -> tuple[Scheduler, RequestPool, KVManager]:
    scheduler = Scheduler(max_batch_size, max_batch_tokens, **options)  # type: ignore[arg-type]
    return scheduler, RequestPool(), KVManager(n_slots, 4, max_batch_size)


def compute(selection: Selection, kv: KVManager) -> None:
    """What an iteration does to the requests, without a model."""
    for item in selection.chosen:
        kv.extend(item.request.request_id, item.n_tokens)
        item.request.advance(item.n_tokens)
        if item.request.n_uncomputed == 0:
            item.request.append(7, 0.0)


def add(pool: RequestPool, *sizes: tuple[int, int]) -> list[Request]:
    requests = [make_state(*size) for size in sizes]
    for request in requests:
        pool.add(request)
    return requests


def test_requests_join_in_arrival_order_up_to_the_batch_size() -> None:
    scheduler, pool, kv = setup(max_batch_size=2)
    a, b, c = add(pool, (3, 2), (3, 2), (3, 2))
    selection = scheduler.select(pool, kv, 1.0)
    assert [(item.request, item.n_tokens) for item in selection.chosen] == [(a, 3), (b, 3)]
    assert c.state is RequestState.WAITING
    assert (a.admitted_at, kv.reserved_slots, pool.queued_slots) == (1.0, 10, 5)


def test_the_head_that_does_not_fit_is_not_overtaken() -> None:
    scheduler, pool, kv = setup(n_slots=10)
    a, b, c = add(pool, (4, 4), (4, 4), (1, 1))
    assert [item.request for item in scheduler.select(pool, kv, 0.0).chosen] == [a]
    assert b.state is c.state is RequestState.WAITING


def test_slots_are_reserved_once_and_a_running_request_always_runs() -> None:
    scheduler, pool, kv = setup(n_slots=8)
    (a,) = add(pool, (4, 4))
    compute(scheduler.select(pool, kv, 0.0), kv)
    add(pool, (4, 4))
    for expected in (1, 1, 1):
        selection = scheduler.select(pool, kv, 0.0)
        assert [(item.request, item.n_tokens) for item in selection.chosen] == [(a, expected)]
        compute(selection, kv)
        assert kv.reserved_slots == 8


def test_one_that_can_never_fit_fails_alone_behind_two_running_ones() -> None:
    """Field cases D1 and D2: no freeze, no exception, no lost reservation."""
    scheduler, pool, kv = setup(n_slots=20)
    a, b = add(pool, (3, 3), (3, 3))
    compute(scheduler.select(pool, kv, 0.0), kv)
    big, small = add(pool, (10, 11), (2, 2))
    selection = scheduler.select(pool, kv, 0.0)
    assert [item.request for item in selection.chosen] == [a, b, small]
    ((rejected, error),) = selection.rejected
    assert rejected is big
    assert isinstance(error, RequestTooLargeError)
    assert "21" in str(error)
    assert "20" in str(error)
    assert kv.reserved_slots == 16


def test_a_long_prompt_is_initiated_in_pieces_beside_increments() -> None:
    scheduler, pool, kv = setup(max_batch_tokens=8)
    (a,) = add(pool, (2, 9))
    compute(scheduler.select(pool, kv, 0.0), kv)
    (b,) = add(pool, (20, 4))
    pieces = []
    for _ in range(3):
        selection = scheduler.select(pool, kv, 0.0)
        assert (selection.chosen[0].request, selection.chosen[0].n_tokens) == (a, 1)
        assert selection.chosen[1].request is b
        pieces.append(selection.chosen[1].n_tokens)
        compute(selection, kv)
    assert pieces == [7, 7, 6]
    assert b.n_output_tokens == 1


def test_a_half_initiated_request_goes_before_a_newcomer() -> None:
    scheduler, pool, kv = setup(max_batch_tokens=4)
    a, b = add(pool, (6, 2), (3, 2))
    compute(scheduler.select(pool, kv, 0.0), kv)
    selection = scheduler.select(pool, kv, 0.0)
    assert [(item.request, item.n_tokens) for item in selection.chosen] == [(a, 2), (b, 2)]


def test_several_initiations_share_the_rows_oldest_first() -> None:
    scheduler, pool, kv = setup(n_slots=200, max_batch_tokens=10)
    a, b, c = add(pool, (14, 2), (9, 2), (4, 2))
    seen = []
    for _ in range(4):
        selection = scheduler.select(pool, kv, 0.0)
        seen.append([("abc"[[a, b, c].index(item.request)], item.n_tokens) for item in selection.chosen])
        compute(selection, kv)
        for request in [r for r in pool.running() if r.n_output_tokens == 2]:
            kv.release(request.request_id)
            pool.finish(request)
    assert seen == [[("a", 10)], [("a", 4), ("b", 6)], [("a", 1), ("b", 3), ("c", 4)], [("b", 1), ("c", 1)]]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=25), st.integers(4, 40))
def test_a_running_stream_gets_a_row_in_every_iteration_of_bounded_size(
    sizes: list[tuple[int, int]], max_batch_tokens: int
) -> None:
    """So the gap between two tokens of a stream is one iteration of at most ``max_batch_tokens`` rows, always."""
    scheduler, pool, kv = setup(n_slots=120, max_batch_tokens=max_batch_tokens)
    left = [make_state(*size) for size in sizes]
    while left or len(pool):
        if left:
            pool.add(left.pop())
        streaming = {r.request_id for r in pool.running() if r.n_output_tokens}
        initiating = [r for r in pool.running() if not r.n_output_tokens]
        selection = scheduler.select(pool, kv, 0.0)
        rows = {item.request.request_id: item.n_tokens for item in selection.chosen}
        assert len(rows) == len(selection.chosen)
        assert sum(rows.values()) <= max_batch_tokens
        assert all(rows[name] == 1 for name in streaming)
        # of those in initiation only the last that got rows may have got less than it could use
        got = [rows.get(r.request_id, 0) - r.n_uncomputed for r in initiating]
        assert all(value == 0 for value in got[: next((i for i, v in enumerate(got) if v), len(got))])
        assert not initiating or rows.get(initiating[0].request_id, 0) > 0
        compute(selection, kv)
        for request in [r for r in pool.running() if r.n_output_tokens == r.spec.max_new_tokens]:
            kv.release(request.request_id)
            pool.finish(request)


def test_increments_always_fit_since_the_batch_size_bounds_them() -> None:
    scheduler, pool, kv = setup(max_batch_size=4, max_batch_tokens=4)
    requests = add(pool, (1, 5), (1, 5), (1, 5), (1, 5))
    for _ in range(3):
        selection = scheduler.select(pool, kv, 0.0)
        assert [item.request for item in selection.chosen] == requests
        compute(selection, kv)


def test_an_empty_pool_gives_an_empty_selection() -> None:
    scheduler, pool, kv = setup()
    assert scheduler.select(pool, kv, 0.0).chosen == []


def test_a_ledger_that_fails_for_one_request_does_not_stop_the_others() -> None:
    scheduler, pool, kv = setup()
    kv.reserve("twice", 4)
    pool.add(make_state(request_id="twice"))
    (b,) = add(pool, (2, 2))
    selection = scheduler.select(pool, kv, 0.0)
    assert [request.request_id for request, _ in selection.rejected] == ["twice"]
    assert [item.request for item in selection.chosen] == [b]


# ---- the line when its head does not fit


def end(pool: RequestPool, kv: KVManager, request: Request) -> None:
    kv.release(request.request_id)
    pool.finish(request)


def test_strictly_nobody_passes_a_blocked_head_however_small() -> None:
    scheduler, pool, kv = setup(n_slots=10)
    a, head, small = add(pool, (4, 2), (4, 4), (1, 1))
    for now in range(50):
        scheduler.select(pool, kv, float(now))
        assert [a, head, small] == list(pool)
        assert pool.n_running == 1
    end(pool, kv, a)
    scheduler.select(pool, kv, 50.0)
    assert list(pool.running()) == [head, small]


def test_some_may_pass_a_blocked_head_for_so_many_seconds() -> None:
    scheduler, pool, kv = setup(n_slots=20, max_batch_size=8, overtaking_s=5.0, max_overtakers=100)
    a, head = add(pool, (4, 4), (8, 8))
    scheduler.select(pool, kv, 10.0)
    assert (head.state, head.blocked_since) == (RequestState.WAITING, 10.0)
    for now, passes in ((11.0, True), (14.9, True), (15.0, False), (1000.0, False)):
        (small,) = add(pool, (1, 1))
        scheduler.select(pool, kv, now)
        assert (small.state is RequestState.RUNNING) is passes
        end(pool, kv, small)
    assert (head.n_overtakers, head.blocked_since) == (2, 10.0)
    end(pool, kv, a)
    scheduler.select(pool, kv, 1001.0)
    assert head.state is RequestState.RUNNING


def test_no_more_than_so_many_pass_a_blocked_head() -> None:
    scheduler, pool, kv = setup(n_slots=20, max_batch_size=8, overtaking_s=1e9, max_overtakers=2)
    a, head, *small = add(pool, (4, 4), (8, 8), (1, 1), (8, 8), (1, 1), (1, 1))
    scheduler.select(pool, kv, 0.0)
    assert list(pool.running()) == [a, small[0], small[2]]
    assert head.n_overtakers == 2
    end(pool, kv, a)
    for request in (small[0], small[2]):
        end(pool, kv, request)
    scheduler.select(pool, kv, 1.0)
    assert list(pool.running()) == [head, small[3]]  # the next head starts with a count and a clock of its own
    assert (small[1].blocked_since, small[1].n_overtakers) == (1.0, 1)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), max_size=60), st.integers(0, 4), st.integers(0, 30))
def test_a_head_cannot_starve(sizes: list[tuple[int, int]], max_overtakers: int, overtaking_s: int) -> None:
    """A request arrives in every iteration; still the head is admitted in a bounded time, and everybody is."""
    scheduler, pool, kv = setup(n_slots=24, overtaking_s=float(overtaking_s), max_overtakers=max_overtakers)
    waiting = [make_state(*size) for size in sizes]
    everybody = list(waiting)
    for now in range(len(sizes) * 12 + 1):
        if waiting:
            pool.add(waiting.pop(0))
        compute(scheduler.select(pool, kv, float(now)), kv)
        for request in [r for r in pool.running() if r.n_output_tokens == r.spec.max_new_tokens]:
            end(pool, kv, request)
    assert not len(pool)
    for request in everybody:
        assert request.n_overtakers <= max_overtakers * bool(overtaking_s)


def test_a_line_of_requests_that_never_fit_is_emptied_in_a_few_iterations() -> None:
    scheduler, pool, kv = setup(n_slots=8)
    add(pool, *[(8, 8)] * 500, (1, 1))
    n_iterations = 0
    while pool.n_waiting:
        for request, _ in scheduler.select(pool, kv, 0.0).rejected:
            pool.finish(request)
        n_iterations += 1
        assert n_iterations < 20
    assert pool.n_running == 1
