"""The serving plane in virtual time: a service that has scaled to zero, and who comes then."""

from __future__ import annotations

import pytest

from deployment.waker import NO_REPLICA_RETRY_S, UNKNOWN_START_S
from orca_core.errors import DeadlineExceededError, OverloadedError, UnavailableError
from tests.deployment.far_replicas import FarReplica, FarReplicas
from tests.deployment.plane import Plane, replicas_of, settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make

__all__ = ["make"]


async def at_zero(make: Make, **given: object) -> Plane:
    plane = make(FarReplicas(), **{"from_zero": "wait", **given})
    await plane.poll()
    return plane


async def start_one(plane: Plane, after_s: float, name: str = "a") -> None:
    """What Serve does about a call that waits."""
    plane.clock.now += after_s
    plane.replicas.add(FarReplica(name, 40))
    await plane.poll()


async def stop_all(plane: Plane) -> None:
    """Scaled to zero: Serve takes the replicas out of its set, and they end when their links are closed."""
    plane.replicas.names.clear()
    for _ in range(12):
        await plane.poll()
    assert not len(plane.dispatcher._links)


async def test_who_comes_first_waits_and_has_a_replica_started(make: Make) -> None:
    plane = await at_zero(make)
    clients = [plane.ask() for _ in range(3)]
    await settle()
    assert plane.dispatcher.waiting_requests == 3
    assert (plane.replicas.n_firsts, plane.replicas.n_waiting) == (1, 1), "one call is enough"
    await plane.pass_time(5.0)
    assert plane.replicas.n_firsts == 1
    await start_one(plane, 0.0)
    await plane.run_out()
    for client in clients:
        assert_undisturbed(client)
        timings = client.got[-1].chunk.timings
        assert timings is not None
        assert timings.queue_s >= 5.0, "the start is part of the wait"
    assert plane.replicas.n_waiting == 0
    plane.assert_idle()


async def test_nobody_is_called_while_nobody_wants_anything(make: Make) -> None:
    plane = await at_zero(make)
    await plane.pass_time(20.0)
    assert plane.replicas.n_firsts == 0


async def test_a_service_that_never_scales_to_zero_refuses_and_calls_nobody(make: Make) -> None:
    plane = await at_zero(make, from_zero=None)
    with pytest.raises(UnavailableError, match="no replica") as caught:
        plane.ask()
    await settle()
    assert caught.value.retry_after_s == NO_REPLICA_RETRY_S
    assert plane.replicas.n_firsts == 0


async def test_the_line_has_its_bounds_at_zero_too(make: Make) -> None:
    plane = await at_zero(make, max_requests=2)
    for _ in range(2):
        plane.ask()
    with pytest.raises(OverloadedError, match="too many requests"):
        plane.ask()
    with pytest.raises(OverloadedError, match="slots"):
        (await at_zero(make, max_slots=9)).ask(4, 6)


async def test_a_deadline_passes_before_the_first_replica_is_there(make: Make) -> None:
    plane = await at_zero(make)
    late, patient = plane.ask(timeout_s=3.0), plane.ask()
    await plane.pass_time(3.0)
    assert isinstance(late.error, DeadlineExceededError)
    await start_one(plane, 3.0)
    await plane.run_out()
    assert_undisturbed(patient)


async def test_how_long_a_start_takes_is_remembered_and_told(make: Make) -> None:
    """Measured: 30 s. Who has less than that is refused at once, and told when to come back."""
    plane = await at_zero(make)
    first = plane.ask(timeout_s=20.0)
    assert first.error is None, "nothing is known yet"
    await start_one(plane, 30.0)
    await stop_all(plane)
    with pytest.raises(OverloadedError, match="in about 30 s, after its deadline") as caught:
        plane.ask(timeout_s=20.0)
    assert caught.value.retry_after_s == 30.0
    await settle()
    assert plane.replicas.n_waiting == 1, "somebody has wanted it all the same"
    plane.clock.now += 15.0
    in_time = plane.ask(timeout_s=20.0)
    assert in_time.error is None, "15 s are left of the start"
    await start_one(plane, 15.0, "b")
    await plane.run_out()
    assert_undisturbed(in_time)


async def test_refused_with_a_delay_where_it_is_not_to_wait(make: Make) -> None:
    plane = await at_zero(make, from_zero="refuse")
    with pytest.raises(UnavailableError, match="no replica") as caught:
        plane.ask()
    assert caught.value.retry_after_s == UNKNOWN_START_S
    await settle()
    assert plane.replicas.n_waiting == 1, "it is started for whoever comes back"
    await start_one(plane, 25.0)
    client = plane.ask()
    await plane.run_out()
    assert_undisturbed(client)
    await stop_all(plane)
    with pytest.raises(UnavailableError) as caught:
        plane.ask()
    assert caught.value.retry_after_s == 25.0
    plane.clock.now += 20.0
    with pytest.raises(UnavailableError) as caught:
        plane.ask()
    assert caught.value.retry_after_s == 5.0


async def test_refused_as_soon_as_a_poll_finds_nobody_though_the_links_are_still_open(make: Make) -> None:
    """Probes say not ready then; who would be sent to a replica that is about to end would wait for the next one."""
    plane = await at_zero(make, from_zero="refuse")
    await start_one(plane, 0.0)
    plane.replicas.names.clear()
    await plane.poll()
    assert len(plane.dispatcher._links) == 1
    with pytest.raises(UnavailableError, match="no replica"):
        plane.ask()
    await settle()
    assert plane.replicas.n_waiting == 1


async def test_a_stream_whose_last_replica_is_lost_has_another_one_started(make: Make) -> None:
    plane = await at_zero(make)
    await start_one(plane, 0.0)
    client = plane.ask(4, 12)
    await plane.step(3)
    plane.replicas.all["a"].kill()
    plane.replicas.names.clear()
    await plane.pass_time(1.0)
    assert plane.replicas.n_waiting == 1
    await start_one(plane, 1.0, "b")
    await plane.run_out()
    assert_undisturbed(client, resumes=1)


async def test_a_call_that_fails_is_made_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    plane = await at_zero(make)
    real, plane.replicas.first = plane.replicas.first, failing  # type: ignore[method-assign]
    client = plane.ask()
    await settle()
    assert "no replica could be asked for: ConnectionError" in caplog.messages
    plane.replicas.first = real  # type: ignore[method-assign]
    await plane.poll()
    assert plane.replicas.n_waiting == 1
    await start_one(plane, 1.0)
    await plane.run_out()
    assert_undisturbed(client)


async def failing() -> None:
    raise ConnectionError


async def test_time_without_any_replica_tells_nothing_of_how_fast_the_line_moves(make: Make) -> None:
    """Forty slots every 16 s, after a start of ten minutes."""
    plane = await at_zero(make)
    for _ in range(8):
        plane.ask(4, 16)
    await start_one(plane, 600.0)
    for _ in range(16 * 2):
        plane.clock.now += 1.0
        await plane.step()
    rate = plane.dispatcher._line.rate.per_second()
    assert rate == pytest.approx(40 / 16, rel=0.4)


async def test_closing_ends_the_call(make: Make) -> None:
    plane = await at_zero(make)
    plane.ask()
    await settle()
    plane.dispatcher.close()
    await settle()
    assert plane.replicas.n_waiting == 0


@pytest.mark.parametrize("mode", ["wait", "refuse"])
async def test_who_comes_while_the_last_replica_leaves_has_another_one_started(make: Make, mode: str) -> None:
    """Serve has taken it out of its set, and its link is still open: it says how it stands, but takes nothing."""
    plane = await at_zero(make, from_zero=mode)
    await start_one(plane, 0.0)
    plane.replicas.names.clear()
    client = plane.ask()
    await settle()
    assert plane.replicas.n_waiting == 1
    assert len(plane.dispatcher._links) == 1
    if mode == "refuse":
        with pytest.raises(UnavailableError, match="no replica"):
            plane.ask()
    plane.clock.now += 4.0
    await plane.beat()
    assert plane.dispatcher.waker.left_s() is None, "that was no start"
    await start_one(plane, 4.0, "b")
    await plane.run_out()
    assert_undisturbed(client)
    assert client.got[-1].replica == "b"
    assert plane.dispatcher.waker.left_s() == 8.0


async def test_a_link_that_opens_is_no_reason_to_call(make: Make) -> None:
    plane = make(replicas_of("a"), from_zero="wait")
    await plane.dispatcher._links.poll()
    client = plane.ask()  # the link is there, and nothing has come over it yet
    await plane.run_out()
    assert_undisturbed(client)
    assert plane.replicas.n_firsts == 0
