"""Algorithm 1: first come, first served, with one reservation at admission."""

from __future__ import annotations

from orca_core.errors import RequestTooLargeError
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request, RequestState
from orca_core.scheduler import Scheduler, Selection
from tests.core.builders import make_state


def setup(n_slots: int = 64, max_batch_size: int = 4, max_batch_tokens: int = 32) -> tuple:  # type: ignore[type-arg]
    return Scheduler(max_batch_size, max_batch_tokens), RequestPool(), KVManager(n_slots, 4, max_batch_size)


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
