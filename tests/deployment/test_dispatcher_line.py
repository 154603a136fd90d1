"""The serving plane in virtual time: the bounds of the waiting line."""

from __future__ import annotations

import asyncio
import random

import pytest

from orca_core.errors import (
    DeadlineExceededError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from tests.deployment.far_replicas import FarReplica, FarReplicas
from tests.deployment.plane import Plane, replicas_of, settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready

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


# ---- who is turned down by a replica


async def test_who_was_sent_at_once_and_is_turned_down_is_judged_like_a_newcomer(make: Make) -> None:
    """Two ingresses see the same room and both send: what bounces must not make the line longer than its bound."""
    replicas = replicas_of("a", n_slots=100)
    first, second = make(replicas, max_requests=2), make(replicas, max_requests=2)
    for plane in (first, second):
        await plane.poll()
    served = [first.ask(4, 16) for _ in range(5)]
    await settle()
    bounced = [second.ask(4, 16) for _ in range(5)]  # it has not heard of those
    await settle()
    assert second.dispatcher.waiting_requests == 2
    assert [client.error is None for client in bounced] == [True, True, False, False, False], "the last are refused"
    for client in bounced[2:]:
        assert isinstance(client.error, OverloadedError)
        assert client.error.retry_after_s is not None
    await second.run_out()
    for client in (*served, *bounced[:2]):
        assert_undisturbed(client)
    first.assert_idle()
    second.assert_idle()


async def test_who_is_turned_down_while_there_is_room_elsewhere_needs_no_place(make: Make) -> None:
    replicas = replicas_of("a", "b", n_slots=20)
    first, second = make(replicas, max_requests=0), make(replicas, max_requests=0)
    for plane in (first, second):
        await plane.poll()
    first.ask(4, 16)
    await settle()
    client = second.ask(4, 16)  # may go to the one that is full, and then to the other
    await settle()
    assert client.error is None
    assert sorted(len(far.engine.running) for far in replicas.all.values()) == [1, 1]


async def test_a_promised_place_is_kept_while_its_owner_is_away(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20, max_requests=2)
    far = plane.replicas.all["a"]
    first = plane.ask(4, 2)
    promised = [plane.ask(4, 16) for _ in range(2)]
    await settle()
    far.submit_waits = asyncio.Event()
    await plane.step(2)  # the first ends, the head of the line is on its way
    assert first.finished
    assert plane.dispatcher.waiting_requests == 1
    with pytest.raises(OverloadedError, match="too many requests"):
        plane.ask(4, 16)
    far.engine.error = OverloadedError("full after all", 1.0)
    far.submit_waits.set()
    await settle()
    assert plane.dispatcher.waiting_requests == 2
    assert [client.error for client in promised] == [None, None]
    far.engine.error = far.submit_waits = None
    await plane.run_out()
    for client in promised:
        assert_undisturbed(client)
    assert [request.request_id.split(".")[0] for request in far.engine.seen] == ["r1", "r2", "r3"]
    for _ in range(3):  # the places are free again
        plane.ask(4, 16)


async def test_a_promised_place_is_kept_in_slots_too(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20, max_slots=40)
    plane.ask(4, 2)
    for _ in range(2):
        plane.ask(4, 16)
    await settle()
    plane.replicas.all["a"].submit_waits = asyncio.Event()
    await plane.step(2)
    with pytest.raises(OverloadedError, match="slots"):
        plane.ask(4, 16)


async def measured(make: Make) -> Plane:
    """One request of 20 slots every 16 s, and one that runs."""
    plane = await ready(make, "a", n_slots=20)
    for _ in range(6):
        plane.ask(4, 16)
    for _ in range(16 * 5):
        plane.clock.now += 1.0
        await plane.step()
    assert plane.dispatcher.waiting_requests == 0
    return plane


async def test_who_is_turned_down_too_late_for_its_deadline_is_told_at_once(make: Make) -> None:
    plane = await measured(make)
    far = plane.replicas.all["a"]
    late, patient = plane.ask(4, 16, timeout_s=30.0), plane.ask(4, 16, timeout_s=300.0)
    assert plane.dispatcher.waiting_requests == 2, "16 s of waiting is not too long for either"
    far.submit_waits = asyncio.Event()
    for _ in range(16):
        plane.clock.now += 1.0
        await plane.step()
    assert plane.dispatcher.waiting_requests == 1
    far.engine.error = OverloadedError("full after all", 1.0)
    far.submit_waits.set()
    await settle()
    assert isinstance(late.error, OverloadedError), "14 s are left, and its turn would come in 16"
    assert "after its deadline" in str(late.error)
    assert patient.error is None
    far.engine.error = far.submit_waits = None
    await plane.beat()
    await plane.run_out()
    assert_undisturbed(patient)
    plane.assert_idle()


async def test_only_what_is_in_front_counts_for_who_comes_back(make: Make) -> None:
    plane = await measured(make)
    far = plane.replicas.all["a"]
    head, *others = [plane.ask(4, 16, timeout_s=60.0), *[plane.ask(4, 16, timeout_s=900.0) for _ in range(5)]]
    far.submit_waits = asyncio.Event()
    for _ in range(16):
        plane.clock.now += 1.0
        await plane.step()
    far.engine.error = OverloadedError("full after all", 1.0)
    far.submit_waits.set()
    await settle()
    assert plane.dispatcher.waiting_requests == 6
    assert head.error is None, "the whole line takes 96 s, but it is the first"
    far.engine.error = far.submit_waits = None
    await plane.beat()
    await plane.run_out()
    for client in (head, *others):
        assert_undisturbed(client)


async def test_a_stream_that_has_begun_is_never_judged(make: Make) -> None:
    """Its replica is lost, the line is full and slow: it has been accepted once, and waits until its deadline."""
    plane = await ready(make, "a", "b", n_slots=20, max_requests=1)
    streams = [plane.ask(4, 16), plane.ask(4, 16)]
    waiting = plane.ask(4, 16)
    await plane.step(3)
    for name in "ab":
        plane.replicas.all[name].kill()
        plane.replicas.names.discard(name)
    await settle()
    assert plane.dispatcher.waiting_requests == 3
    plane.replicas.add(FarReplica("c", 20))
    await plane.poll()
    await plane.run_out()
    for client in streams:
        assert_undisturbed(client, resumes=1)
    assert_undisturbed(waiting)


@pytest.mark.parametrize("seed", range(3))
async def test_no_line_is_ever_longer_than_its_bounds(make: Make, seed: int) -> None:
    """Three ingresses run into each other at random: each request ends whole, or was refused without a token."""
    rng = random.Random(seed)
    replicas = replicas_of("a", "b", n_slots=100)
    planes = [make(replicas, max_requests=3, max_slots=50, seed=seed + number) for number in range(3)]
    for plane in planes:
        await plane.poll()
    n_refused = 0
    for _ in range(25):
        for _ in range(rng.randint(1, 30)):
            plane = rng.choice(planes)
            try:
                plane.ask(rng.randint(1, 8), rng.randint(1, 16))
            except OverloadedError:
                n_refused += 1
            if rng.random() < 0.3:
                await settle()
            depths = [each.dispatcher.line_depth() for each in planes]
            assert all(
                depth.requests <= 3 and depth.slots <= 50
                for depth, each in zip(depths, planes, strict=True)
                if not each.dispatcher._returned  # it has not looked at these yet
            )
        await planes[0].step(rng.randint(0, 16))
    for plane in planes:
        await plane.run_out()
    for plane in planes:
        plane.assert_idle()
    bounced = [client for plane in planes for client in plane.clients if client.error is not None]
    assert all(isinstance(client.error, OverloadedError) and not client.tokens for client in bounced)
    assert bounced, "some were turned down by a replica"
    assert n_refused
    for client in (client for plane in planes for client in plane.clients if client.error is None):
        assert_undisturbed(client)
