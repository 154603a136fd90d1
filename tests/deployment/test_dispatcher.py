"""The serving plane in virtual time: real replicas over an engine without a model, killed, frozen, full, slow."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from deployment.links import ALONE_UNTIL_MISSES
from deployment.replica import LEASE_S
from deployment.sender import MAX_FAILURES
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from orca_core.types import FinishReason
from tests.deployment.plane import INTERVAL_S, SILENCE_S, Client, Clock, Plane, replicas_of, settle
from tests.deployment.stepping import FarReplica, FarReplicas, answer_of

Make = Callable[..., Plane]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Plane] = []

    def plane(replicas: FarReplicas, clock: Clock | None = None, **given: int) -> Plane:
        made.append(Plane(replicas, clock or Clock(), prefix="r" if not made else f"p{len(made)}-", **given))
        return made[-1]

    yield plane
    for each in made:
        await each.close()


async def ready(make: Make, *names: str, n_slots: int = 128, max_batch_size: int = 16, **given: int) -> Plane:
    plane = make(
        replicas_of(*names, n_slots=n_slots, max_batch_size=max_batch_size), max_batch_size=max_batch_size, **given
    )
    await plane.poll()
    return plane


def where(plane: Plane) -> Counter[str]:
    """How many requests run on which replica."""
    return Counter({name: len(far.engine.running) for name, far in plane.replicas.all.items()})


def assert_undisturbed(client: Client, resumes: int = 0) -> None:
    """It has got every token and every letter, once, and an end that counts them all."""
    expected = answer_of(client.stream._request)
    assert client.error is None
    assert client.tokens == expected
    assert client.text == "".join(f"{token_id} " for token_id in expected)
    last = client.got[-1]
    assert last.chunk.finish_reason is FinishReason.LENGTH
    assert last.chunk.usage is not None
    assert last.chunk.usage.completion_tokens == len(expected)
    assert last.resumes == resumes


# ---- the plain way


async def test_a_stream_from_end_to_end(make: Make) -> None:
    plane = await ready(make, "a")
    client = plane.ask()
    plane.clock.now += 2.0
    await settle()
    await plane.step()
    assert len(client.tokens) == 1  # the first token at once
    plane.clock.now += 3.0
    await plane.run_out()
    assert_undisturbed(client)
    assert client.got[0].replica == "a"
    assert {resumed.chunk.request_id for resumed in client.got} == {"r1"}
    timings = client.got[-1].chunk.timings
    assert timings is not None
    assert (timings.ttft_s, timings.total_s) == (2.0, 5.0)
    plane.assert_idle()


async def test_an_iteration_is_one_parcel_for_all_requests_of_an_ingress(make: Make) -> None:
    plane = await ready(make, "a", n_slots=1000)
    clients = [plane.ask(4, 20) for _ in range(16)]
    await settle()
    far = plane.replicas.all["a"]
    seen = []
    for _ in range(5):
        far.engine.step()
        await settle()
        seen.append([len(client.tokens) for client in clients])
    assert seen == [[n] * 16 for n in range(1, 6)]
    parcels = far.streams[0]
    assert parcels.n_parcels <= 1 + 5 + 1


async def test_requests_of_one_instant_take_turns(make: Make) -> None:
    """Field case E1: eight at once over two idle replicas."""
    plane = await ready(make, "a", "b")
    for _ in range(8):
        plane.ask()
    await settle()
    assert where(plane) == {"a": 4, "b": 4}


async def test_several_ingresses_spread_a_burst(make: Make) -> None:
    """Field case E2: 48 requests at once through three ingresses, none of which sees what the others send."""
    replicas = replicas_of("a", "b", "c", "d", n_slots=400)
    planes = [make(replicas, seed=seed) for seed in range(3)]
    for plane in planes:
        await plane.poll()
    for number in range(48):
        planes[number % 3].ask(4, 20)
    await settle()
    counts = where(planes[0])
    assert sum(counts.values()) == 48
    assert max(counts.values()) / min(counts.values()) <= 1.5
    for plane in planes:
        await plane.run_out()


async def test_the_line_is_first_come_first_served(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20)
    order = [plane.ask(4, 16)] + [plane.ask(4, n) for n in (10, 2, 12, 1)]
    await settle()
    assert plane.dispatcher.waiting_requests == 4  # the small ones fit, but not before the one in front of them
    assert plane.dispatcher.waiting_slots == 14 + 6 + 16 + 5
    await plane.run_out()
    assert [request.request_id for request in plane.replicas.all["a"].engine.seen] == [
        f"r{n}.1" for n in (1, 2, 3, 4, 5)
    ]
    for client in order:
        assert_undisturbed(client)
    plane.assert_idle()


async def test_small_ones_may_pass_a_head_that_fits_nowhere_for_a_while(make: Make) -> None:
    plane = await ready(make, "a", n_slots=40, overtaking_s=2, max_overtakers=3)
    plane.ask(4, 16)
    big = plane.ask(4, 36)
    small = [plane.ask(1, 2) for _ in range(5)]
    await settle()
    assert [request.request_id for request in plane.replicas.all["a"].engine.seen] == ["r1.1", "r3.1", "r4.1", "r5.1"]
    await plane.run_out()
    assert [request.request_id for request in plane.replicas.all["a"].engine.seen][4] == "r2.1"
    for client in (big, *small):
        assert_undisturbed(client)
    late = await ready(make, "b", n_slots=40, overtaking_s=2, max_overtakers=100)
    late.ask(4, 16)
    late.ask(4, 36)
    await late.pass_time(2.0)
    late.ask(1, 2)
    await settle()
    assert len(late.replicas.all["b"].engine.seen) == 1


async def test_a_new_replica_takes_from_the_line_at_once(make: Make) -> None:
    """Field case E11."""
    plane = await ready(make, "a", n_slots=20)
    for _ in range(20):
        plane.ask(4, 6)
    await settle()
    assert where(plane) == {"a": 2}
    plane.replicas.add(FarReplica("b", 20))
    await plane.poll()
    assert where(plane) == {"a": 2, "b": 2}
    await plane.run_out()
    plane.assert_idle()


async def test_a_replica_that_is_full_for_another_ingress_has_the_last_word(make: Make) -> None:
    """Field case E2: two ingresses see the same room. Who is turned down keeps its place, and loses nothing."""
    replicas = replicas_of("a", n_slots=20)
    planes = [make(replicas, seed=seed) for seed in range(2)]
    for plane in planes:
        await plane.poll()
    clients = [plane.ask(4, 10) for plane in planes]
    late = planes[1].ask(4, 1)
    await settle()
    assert sum(where(planes[0]).values()) <= 2
    assert planes[0].dispatcher.waiting_requests + planes[1].dispatcher.waiting_requests >= 1
    for plane in planes:
        await plane.run_out()
    for client in (*clients, late):
        assert_undisturbed(client)
    for plane in planes:
        plane.assert_idle()


async def test_the_batch_of_a_replica_is_a_limit_too(make: Make) -> None:
    plane = await ready(make, "a", n_slots=1000, max_batch_size=2)
    for _ in range(3):
        plane.ask()
    await settle()
    assert where(plane) == {"a": 2}
    await plane.run_out()
    assert plane.replicas.all["a"].n_submits == 3  # nobody was sent in vain


async def test_a_session_stays_on_its_replica_unless_that_is_much_fuller(make: Make) -> None:
    """Field case E6: by hash, so that every ingress comes to the same."""
    replicas = replicas_of("a", "b", "c")
    planes = [make(replicas, seed=seed) for seed in range(2)]
    homes = set()
    for plane in planes:
        await plane.poll()
        for _ in range(5):
            client = plane.ask(session_id="mine")
            await plane.run_out()
            homes.add(client.got[0].replica)
    assert len(homes) == 1
    others = [planes[0].ask(4, 20, session_id="mine") for _ in range(5)]
    await settle()
    assert len({name for name, n in where(planes[0]).items() if n}) == 3
    await planes[0].run_out()
    for client in others:
        assert_undisturbed(client)


async def test_prompts_that_begin_alike_meet(make: Make) -> None:
    plane = await ready(make, "a", "b", "c", n_slots=10_000)
    homes = {}
    for start in range(12):
        for _ in range(2):
            client = plane.ask(70, 1, first_id=1 + start * 10)
            await plane.run_out()
            homes.setdefault(start, set()).add(client.got[0].replica)
    assert all(len(names) == 1 for names in homes.values())
    assert len(set.union(*homes.values())) == 3


# ---- the bounds of the line


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


# ---- cancelled


async def test_a_cancel_frees_the_slots_and_the_next_one_runs(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20)
    first, second = plane.ask(4, 16), plane.ask(4, 16)
    await plane.step(3)
    first.stream.cancel()
    await settle()
    assert where(plane) == {"a": 1}
    await plane.run_out()
    assert isinstance(first.error, RequestCancelledError)
    assert_undisturbed(second)
    plane.assert_idle()


async def test_many_cancels_of_one_instant_are_one_call(make: Make) -> None:
    plane = await ready(make, "a", n_slots=1000)
    clients = [plane.ask() for _ in range(10)]
    await settle()
    for client in clients:
        client.stream.cancel()
    await settle()
    assert plane.replicas.drops == [tuple(f"r{n}.1" for n in range(1, 11))]
    plane.assert_idle()


@pytest.mark.parametrize("slow", ["submit_waits", "answer_waits"])
async def test_a_cancel_while_the_request_is_on_its_way(make: Make, slow: str) -> None:
    """Field case A2: the drop overtakes the request, or its acceptance meets nobody."""
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    gate = asyncio.Event()
    setattr(far, slow, gate)
    client = plane.ask()
    await settle()
    client.stream.cancel()
    await settle()
    gate.set()
    await plane.step()
    assert isinstance(client.error, RequestCancelledError)
    plane.assert_idle()


async def test_a_drop_that_overtakes_its_request_keeps_it_from_beginning(make: Make) -> None:
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    link = next(iter(plane.dispatcher._links))
    plane.replicas.drop("a", link.link_id, ("r9.1",))
    await settle()
    request = plane.stream()._request
    from dataclasses import replace

    answer = await plane.replicas.submit("a", link.link_id, replace(request, request_id="r9.1"), "mine")
    assert type(answer).__name__ == "Rejected"
    assert not far.engine.seen


async def test_cancels_at_every_moment_leave_nothing(make: Make) -> None:
    """Field cases A1, A2, A14: a cancel in line, on the way, before the first word, between words, at the end."""
    plane = await ready(make, "a", "b", n_slots=40)
    for moment in range(60):
        client, other = plane.ask(4, 6), plane.ask(4, 6)
        for turn in range(moment):
            await asyncio.sleep(0)
            if turn % 7 == 6:
                for far in plane.replicas.all.values():
                    far.engine.step()
        client.stream.cancel()
        await plane.run_out()
        assert_undisturbed(other)
        assert client.finished != isinstance(client.error, RequestCancelledError)
        plane.clients.clear()
        plane.assert_idle()


async def test_a_reader_that_stalls_is_cancelled_and_hurts_nobody(make: Make) -> None:
    """Field case B20."""
    plane = await ready(make, "a", n_slots=1000, max_backlog=5)
    stalled, other = plane.ask(4, 30), plane.ask(4, 30)
    stalled.reads.clear()
    await plane.step(8)
    assert where(plane) == {"a": 1}
    stalled.reads.set()
    await plane.run_out()
    assert isinstance(stalled.error, RequestCancelledError)
    assert stalled.tokens == answer_of(stalled.stream._request)[: len(stalled.tokens)]
    assert_undisturbed(other)
    plane.assert_idle()


# ---- lost


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


# ---- the way out of a replica


async def test_a_replica_that_leaves_the_set_finishes_what_it_has_and_is_let_go(make: Make) -> None:
    """Field cases F4, F6, H11: out of the router, nothing new, drained, gone."""
    plane = await ready(make, "a", "b")
    clients = [plane.ask(4, 12) for _ in range(4)]
    await plane.step(2)
    plane.replicas.names.discard("a")
    late = [plane.ask(4, 12) for _ in range(3)]  # some meet a replica that Serve does not know any more
    await plane.pass_time(2 * INTERVAL_S)
    late += [plane.ask(4, 12) for _ in range(3)]
    await plane.step(1)
    assert len(plane.replicas.all["a"].engine.seen) == 2
    assert plane.replicas.all["a"].replica._attached
    await plane.run_out()
    await plane.pass_time(INTERVAL_S)
    for client in (*clients, *late):
        assert_undisturbed(client)
    assert not plane.replicas.all["a"].replica._attached  # Serve sees no call any more and ends it
    plane.assert_idle()


async def test_a_replica_that_leaves_is_shown_that_we_live_for_as_long_as_it_takes(make: Make) -> None:
    clock = Clock()
    replicas = FarReplicas()
    replicas.add(*(FarReplica(name, clock=clock, heartbeat_s=INTERVAL_S) for name in "ab"))
    plane = make(replicas, clock)
    await plane.poll()
    client = plane.ask(4, 12)
    await plane.step(2)
    home = client.got[0].replica
    replicas.names.discard(home)
    for _ in range(round(3 * LEASE_S)):
        await plane.pass_time(1.0)
        replicas.all[home].replica._end_leases()
    await plane.run_out()
    assert_undisturbed(client)
    assert client.got[-1].replica == home


async def test_an_idle_replica_that_leaves_is_let_go_after_two_polls(make: Make) -> None:
    plane = await ready(make, "a", "b")
    plane.replicas.names.discard("a")
    await plane.poll()
    assert plane.replicas.all["a"].replica._attached
    await plane.poll()
    assert not plane.replicas.all["a"].replica._attached


async def test_links_work_while_serve_knows_of_no_replica(make: Make) -> None:
    """Field case F11: a controller that restarts broadcasts an empty set."""
    plane = await ready(make, "a")
    plane.replicas.names.clear()
    for _ in range(4):
        await plane.poll()
    client = plane.ask()
    plane.replicas.names.add("a")
    await plane.run_out()
    assert_undisturbed(client)
    plane.replicas.names.clear()
    for _ in range(ALONE_UNTIL_MISSES):
        await plane.poll()
    assert not plane.replicas.all["a"].replica._attached


# ---- the death of an ingress


async def test_a_replica_frees_what_a_dead_ingress_had(make: Make) -> None:
    now = Clock(0.0)
    replicas = FarReplicas()
    replicas.add(FarReplica("a", clock=now, heartbeat_s=1.0))
    plane, other = make(replicas), make(replicas)
    for each in (plane, other):
        await each.poll()
    dead, lives = plane.ask(4, 12), other.ask(4, 12)
    await plane.step(2)
    for _ in range(40):  # it polls no more
        now.now += INTERVAL_S
        await other.poll()
        replicas.all["a"].replica._beat_now()
    await settle()
    assert where(plane) == {"a": 1}
    await other.run_out()
    assert_undisturbed(lives)
    assert not dead.finished


async def test_a_second_link_of_an_ingress_ends_what_was_on_the_first(make: Make) -> None:
    plane = await ready(make, "a")
    plane.ask(4, 12)
    await plane.step(2)
    links = plane.dispatcher._links
    second = plane.replicas.attach("a", links.ingress_id, "second")
    await settle()
    assert where(plane) == {"a": 0}
    second.cancel()


@pytest.mark.parametrize("seed", range(6))
async def test_everything_at_random(make: Make, seed: int) -> None:
    """Kills, freezes, drains, new replicas and cancels among streams: each ends whole, or as it was asked to."""
    rng = random.Random(seed)
    plane = make(replicas_of("r0", "r1", "r2", n_slots=60), seed=seed, max_resumes=50)
    await plane.poll()
    cancelled: set[Client] = set()
    for turn in range(60):
        if rng.random() < 0.7:
            plane.ask(rng.randint(1, 8), rng.randint(1, 20))
        disturb(plane, rng, turn, cancelled)
        await plane.step(rng.randint(0, 2))
        await plane.pass_time(INTERVAL_S)
    for far in plane.replicas.all.values():
        far.thaw()
    await plane.pass_time(SILENCE_S * 2)
    await plane.run_out()
    for client in plane.clients:
        if client not in cancelled:
            assert_undisturbed(client, resumes=client.got[-1].resumes)
    plane.assert_idle()


def disturb(plane: Plane, rng: random.Random, turn: int, cancelled: set[Client]) -> None:
    alive = [far for name, far in plane.replicas.all.items() if far.runs and name in plane.replicas.names]
    act = rng.random()
    if len(alive) > 1 and act < 0.2:
        victim = rng.choice(alive)
        if act < 0.08:
            victim.kill()
        elif act < 0.14:
            victim.freeze()
        else:
            plane.replicas.names.discard(victim.name)
    elif act < 0.3:
        plane.replicas.add(FarReplica(f"n{turn}", 60))
    elif act < 0.4 and plane.clients:
        client = rng.choice(plane.clients)
        cancelled.add(client)
        client.stream.cancel()
    elif act < 0.45:
        for far in plane.replicas.all.values():
            far.thaw()
