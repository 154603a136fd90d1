"""The serving plane in virtual time: replicas that are killed, freeze or fail."""

from __future__ import annotations

import asyncio

import pytest

from deployment.sender import MAX_FAILURES
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from tests.deployment.far_replicas import FarReplica
from tests.deployment.plane import INTERVAL_S, SILENCE_S, settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready, where
from tests.deployment.stepping import answer_of

__all__ = ["make"]


async def test_a_killed_replica_s_streams_go_on_elsewhere(make: Make) -> None:
    plane = await ready(make, "a", "b")
    clients = [plane.ask(4, 12) for _ in range(6)]
    await plane.step(5)
    plane.replicas.all["a"].kill()
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client, resumes=0 if client.got[0].replica == "b" else 1)
    assert sum(client.got[-1].resumes for client in clients) == 3
    seen = [request for request in plane.replicas.all["b"].engine.seen if request.emitted_ids]
    assert len(seen) == 3
    assert all(request.request_id.endswith(".2") for request in seen)
    plane.assert_idle()


async def test_what_was_queued_from_the_dead_replica_is_delivered_first(make: Make) -> None:
    plane = await ready(make, "a", "b")
    client = plane.ask(4, 12)
    await plane.step(2)
    client.reads.clear()
    await plane.step(3)
    home = client.got[0].replica
    plane.replicas.all[home].kill()
    await settle()
    client.reads.set()
    await plane.run_out()
    assert_undisturbed(client, resumes=1)
    other = "b" if home == "a" else "a"
    assert len(plane.replicas.all[other].engine.seen[0].emitted_ids) == 5


async def test_a_finish_that_raced_with_the_loss_wins(make: Make) -> None:
    plane = await ready(make, "a", "b")
    client = plane.ask(4, 3)
    await plane.step(1)
    client.reads.clear()
    await plane.step(2)
    plane.replicas.all[client.got[0].replica].kill()
    await settle()
    client.reads.set()
    await plane.run_out()
    assert_undisturbed(client, resumes=0)


async def test_a_frozen_replica_is_lost_after_a_while_and_its_late_words_reach_nobody(make: Make) -> None:
    """Field case E5."""
    plane = await ready(make, "a", "b")
    clients = [plane.ask(4, 12) for _ in range(4)]
    await plane.step(3)
    frozen = plane.replicas.all["a"]
    frozen.engine.step()  # said, and not heard
    frozen.freeze()
    await plane.pass_time(SILENCE_S + 2 * INTERVAL_S)
    assert len(plane.dispatcher._links) == 1
    await plane.step(2)
    frozen.thaw()
    await settle()
    assert not frozen.engine.running  # it has heard that nobody reads there any more
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client, resumes=0 if client.got[0].replica == "b" else 1)
    await plane.poll()
    assert len(plane.dispatcher._links) == 2  # it serves again
    plane.assert_idle()


async def test_while_one_replica_is_frozen_new_requests_are_served(make: Make) -> None:
    """Field case E5: thirty requests, one of three replicas frozen."""
    plane = await ready(make, "a", "b", "c", n_slots=400)
    plane.replicas.all["b"].freeze()
    clients = [plane.ask() for _ in range(30)]
    await plane.step(2)
    assert sum(bool(client.tokens) for client in clients) == 20
    await plane.pass_time(SILENCE_S + 2 * INTERVAL_S)
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client)  # the ten had not been accepted: no stream was lost
    plane.assert_idle()


async def test_an_event_loop_that_stalls_loses_nobody(make: Make) -> None:
    plane = await ready(make, "a")
    client = plane.ask()
    await plane.step()
    plane.clock.now += 100.0  # all at once: whatever has come meanwhile has not been read yet
    plane.dispatcher.tick(2 * INTERVAL_S)
    await plane.beat()
    await plane.run_out()
    assert_undisturbed(client)


async def test_an_engine_that_dies_is_like_a_lost_replica(make: Make) -> None:
    """Field case D19, seen from the client: its stream goes on."""
    plane = await ready(make, "a", "b")
    client = plane.ask(4, 12)
    await plane.step(3)
    plane.replicas.all[client.got[0].replica].engine.die()
    await plane.run_out()
    assert_undisturbed(client, resumes=1)
    await plane.poll()
    assert len(plane.dispatcher._links) == 1  # one that is not well is not linked to


async def test_a_resumed_request_goes_to_the_front_of_the_line(make: Make) -> None:
    plane = await ready(make, "a", "b", n_slots=20)
    running = [plane.ask(4, 16), plane.ask(4, 16)]
    waiting = [plane.ask(4, 16) for _ in range(3)]
    await plane.step(4)
    lost = next(client for client in running if client.got[0].replica == "a")
    plane.replicas.all["a"].kill()
    await plane.run_out()
    seen = [request.request_id for request in plane.replicas.all["b"].engine.seen]
    assert seen[1] == f"{lost.stream._request.request_id}.2"
    assert seen[2:] == ["r3.1", "r4.1", "r5.1"]
    for client in (*running, *waiting):
        assert_undisturbed(client, resumes=client is lost)


async def test_a_request_that_takes_its_replicas_with_it_ends(make: Make) -> None:
    plane = await ready(make, "a", "b", "c", max_resumes=1)
    client = plane.ask(4, 12)
    for _ in range(2):
        await plane.step(2)
        plane.replicas.all[client.got[-1].replica].kill()
        await settle()
    assert isinstance(client.error, UnavailableError)
    assert "2 times" in str(client.error)
    assert client.tokens == answer_of(client.stream._request)[:4]
    plane.assert_idle()


async def test_with_no_replica_left_those_on_board_wait_for_the_next(make: Make) -> None:
    plane = await ready(make, "a")
    client = plane.ask(4, 12)
    await plane.step(3)
    plane.replicas.all["a"].kill()
    await plane.pass_time(20.0)
    with pytest.raises(UnavailableError):
        plane.ask()
    assert plane.dispatcher.waiting_requests == 1
    plane.replicas.add(FarReplica("b"))
    await plane.poll()
    await plane.run_out()
    assert_undisturbed(client, resumes=1)


async def test_a_lost_stream_waits_no_longer_than_its_deadline(make: Make) -> None:
    plane = await ready(make, "a")
    client = plane.ask(4, 12, timeout_s=10.0)
    await plane.step(3)
    plane.replicas.all["a"].kill()
    await plane.pass_time(10.0)
    assert isinstance(client.error, DeadlineExceededError)
    plane.assert_idle()


async def test_a_kill_while_a_request_is_on_its_way_costs_no_resume(make: Make) -> None:
    plane = await ready(make, "a", "b")
    for far in plane.replicas.all.values():
        far.submit_waits = asyncio.Event()
    clients = [plane.ask(), plane.ask()]
    await settle()
    plane.replicas.all["a"].kill()
    for far in plane.replicas.all.values():
        assert far.submit_waits is not None
        far.submit_waits.set()
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client, resumes=0)
    plane.assert_idle()


async def test_a_loss_between_acceptance_and_its_news_runs_nothing_twice(make: Make) -> None:
    """The replica has begun the request, the answer is lost with the link, and the replica comes back."""
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    far.answer_waits = asyncio.Event()
    client = plane.ask()
    await settle()
    assert where(plane) == {"a": 1}
    far.freeze()
    await plane.pass_time(SILENCE_S + 2 * INTERVAL_S)
    far.answer_waits.set()
    far.thaw()
    await plane.poll()
    await plane.run_out()
    assert_undisturbed(client)
    assert [request.request_id for request in far.engine.seen] == ["r1.1", "r1.2"]
    assert "r1.1" in far.engine.cancelled
    plane.assert_idle()


async def test_words_may_come_before_the_acceptance(make: Make) -> None:
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    far.answer_waits = asyncio.Event()
    client = plane.ask()
    await settle()
    await plane.step(2)
    assert len(client.tokens) == 2
    far.answer_waits.set()
    await plane.run_out()
    assert_undisturbed(client)
    plane.assert_idle()


async def test_a_replica_that_sends_parcels_and_no_answer_is_given_up_for_the_request_alone(make: Make) -> None:
    plane = await ready(make, "a", "b")
    clients = [plane.ask(4, 12), plane.ask(4, 12)]
    await plane.step(2)
    for far in plane.replicas.all.values():
        far.submit_waits = asyncio.Event()
    late = plane.ask(4, 12)
    await settle()
    busy = next(far for far in plane.replicas.all.values() if far.n_submits == 2)
    other = next(far for far in plane.replicas.all.values() if far is not busy)
    other.submit_waits = None
    await plane.pass_time(SILENCE_S + INTERVAL_S)
    assert other.n_submits == 2
    await plane.run_out()
    for client in (*clients, late):
        assert_undisturbed(client)
    assert busy.submit_waits is not None
    busy.submit_waits.set()
    await settle()
    plane.assert_idle()


async def test_a_submission_that_fails_is_tried_elsewhere_then(make: Make) -> None:
    plane = await ready(make, "a", "b")
    plane.replicas.all["a"].submit_error = ConnectionError("lost on the way")
    clients = [plane.ask() for _ in range(6)]
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client)
    assert all(client.got[0].replica == "b" for client in clients)
    plane.assert_idle()


async def test_a_submission_that_always_fails_ends_and_nobody_spins(make: Make) -> None:
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    far.submit_error = TypeError("a bug")
    client = plane.ask()
    await settle()
    assert far.n_submits == 1  # not again before the replica has said something
    for _ in range(MAX_FAILURES + 1):
        await plane.beat()
    assert far.n_submits == MAX_FAILURES + 1
    assert isinstance(client.error, TypeError)
    plane.assert_idle()


async def test_a_requests_own_error_ends_it(make: Make) -> None:
    plane = await ready(make, "a")
    plane.replicas.all["a"].engine.error = InvalidRequestError("logit_bias", "is wrong")
    client = plane.ask()
    await settle()
    assert isinstance(client.error, InvalidRequestError)
    plane.assert_idle()
