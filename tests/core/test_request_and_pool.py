"""Guarded transitions and the books of the pool."""

from __future__ import annotations

import pytest

from orca_core.errors import InvariantError
from orca_core.pool import RequestPool
from orca_core.request import RequestState
from tests.core.builders import make_state


def test_a_life() -> None:
    request = make_state(3, 2)
    assert request.in_initiation
    request.admit(1.0)
    request.advance(2)
    assert request.in_initiation
    request.advance(1)
    assert not request.in_initiation
    request.append(9, 2.0)
    request.advance(1)
    request.append(8, 3.0)
    assert (request.output_ids, request.first_token_at, request.n_uncomputed) == ([9, 8], 2.0, 1)
    request.finish()
    assert request.state is RequestState.FINISHED


def test_wrong_moves_are_refused() -> None:
    request = make_state(2, 1)
    with pytest.raises(InvariantError):
        request.advance(1)
    request.admit(0.0)
    with pytest.raises(InvariantError):
        request.admit(0.0)
    with pytest.raises(InvariantError, match="uncomputed"):
        request.append(1, 0.0)
    with pytest.raises(InvariantError):
        request.advance(3)
    request.advance(2)
    request.append(5, 0.0)
    request.advance(1)
    with pytest.raises(InvariantError, match="outgrow"):
        request.append(5, 0.0)
    request.finish()
    with pytest.raises(InvariantError, match="twice"):
        request.finish()


def test_nothing_of_a_prompt_is_in_a_repr() -> None:
    """Field case J5."""
    request = make_state(5)
    for text in (repr(request), repr(request.spec)):
        assert "3, 4" not in text
        assert "token_ids" not in text


def test_the_pool_keeps_arrival_order_and_its_books() -> None:
    pool = RequestPool()
    a, b, c = make_state(1, 1), make_state(2, 2), make_state(3, 3)
    for request in (a, b, c):
        pool.add(request)
    assert pool.queued_slots == 12
    pool.admit(a, 0.0)
    assert (list(pool.running()), list(pool.waiting()), pool.queued_slots) == ([a], [b, c], 10)
    pool.finish(b)
    assert (list(pool), pool.queued_slots, b.state) == ([a, c], 6, RequestState.FINISHED)
    pool.check_integrity()
    pool.finish(a)
    pool.finish(c)
    pool.check_integrity(idle=True)


def test_the_same_id_twice_is_refused() -> None:
    pool = RequestPool()
    pool.add(make_state(request_id="x"))
    with pytest.raises(InvariantError):
        pool.add(make_state(request_id="x"))
    with pytest.raises(InvariantError, match="idle"):
        pool.check_integrity(idle=True)
