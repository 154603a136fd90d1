"""The serving plane in virtual time: the bounds of the waiting line."""

from __future__ import annotations

import pytest

from orca_core.errors import (
    DeadlineExceededError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready
from tests.deployment.stepping import FarReplicas

__all__ = ["make"]


async def test_the_line_is_bounded_and_says_when_to_come_back(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20, max_requests=3)
    for _ in range(1 + 3):
        plane.ask(4, 16)
    with pytest.raises(OverloadedError, match="too many requests") as caught:
        plane.ask(4, 16)
    assert caught.value.retry_after_s > 0
    assert plane.dispatcher.waiting_requests == 3
    await plane.run_out()
    plane.assert_idle()


async def test_the_line_is_bounded_in_slots(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20, max_slots=45)
    for _ in range(1 + 2):
        plane.ask(4, 16)
    with pytest.raises(OverloadedError, match="slots"):
        plane.ask(4, 16)
    plane.ask(4, 1)


async def test_without_a_line_whoever_finds_room_is_served(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20, max_requests=0, max_slots=0)
    client = plane.ask(4, 16)
    with pytest.raises(OverloadedError):
        plane.ask(4, 1)
    await plane.run_out()
    assert_undisturbed(client)


async def test_a_wait_beyond_the_deadline_is_refused_at_once(make: Make) -> None:
    """Measured: a request of 20 slots every 16 s."""
    plane = await ready(make, "a", n_slots=20)
    for _ in range(8):
        plane.ask(4, 16)
    for _ in range(16 * 5):
        plane.clock.now += 1.0
        await plane.step()
    assert plane.dispatcher.waiting_requests == 2
    with pytest.raises(OverloadedError, match="after its deadline") as caught:
        plane.ask(4, 16, timeout_s=40.0)
    assert 40.0 < caught.value.retry_after_s <= 60.0
    plane.ask(4, 16, timeout_s=100.0)
    await plane.run_out()
    plane.assert_idle()


async def test_who_waits_beyond_his_deadline_leaves_uncomputed(make: Make) -> None:
    """Field case G7."""
    plane = await ready(make, "a", n_slots=20)
    first, late = plane.ask(4, 16), plane.ask(4, 16, timeout_s=3.0)
    await plane.pass_time(3.0)
    assert isinstance(late.error, DeadlineExceededError)
    await plane.run_out()
    assert_undisturbed(first)
    assert [request.request_id for request in plane.replicas.all["a"].engine.seen] == ["r1.1"]
    plane.assert_idle()


async def test_who_leaves_the_line_is_never_computed(make: Make) -> None:
    """Field case A10."""
    plane = await ready(make, "a", n_slots=20)
    first, gone = plane.ask(4, 16), [plane.ask(4, 16) for _ in range(20)]
    for client in gone:
        client.stream.cancel()
    await plane.run_out()
    assert_undisturbed(first)
    assert len(plane.replicas.all["a"].engine.seen) == 1
    assert all(isinstance(client.error, RequestCancelledError) for client in gone)
    plane.assert_idle()


async def test_one_that_fits_no_replica_that_is_up_does_not_hold_up_the_others(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20)
    big, small = plane.ask(4, 40), plane.ask(4, 6)
    await plane.run_out()
    assert isinstance(big.error, UnavailableError)
    assert_undisturbed(small)


async def test_without_any_replica_a_request_is_refused(make: Make) -> None:
    plane = make(FarReplicas())
    await plane.poll()
    with pytest.raises(UnavailableError, match="no replica") as caught:
        plane.ask()
    assert caught.value.retry_after_s > 0
