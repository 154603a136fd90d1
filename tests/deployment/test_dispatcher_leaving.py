"""The serving plane in virtual time: the way out of a replica."""

from __future__ import annotations

from deployment.links import ALONE_UNTIL_MISSES
from deployment.replica import LEASE_S
from tests.deployment.far_replicas import FarReplica, FarReplicas
from tests.deployment.plane import INTERVAL_S, Clock
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready

__all__ = ["make"]


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


async def test_a_replica_that_has_left_slows_no_estimate(make: Make) -> None:
    slow, quick = Clock(), Clock()
    replicas = FarReplicas()
    replicas.add(FarReplica("a", clock=slow), FarReplica("b", clock=quick))
    plane = make(replicas)
    await plane.poll()
    for _ in range(2):
        plane.ask(4, 6)
    for _ in range(6):
        slow.now, quick.now = slow.now + 10.0, quick.now + 1.0
        await plane.step()
    assert plane.book.iteration_s == 10.0
    replicas.names.discard("a")
    for _ in range(3):
        await plane.poll()
    assert plane.book.iteration_s == 1.0
    assert set(plane.book._known) == {"b"}


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


async def test_a_request_waits_for_the_next_replica_when_the_last_one_is_leaving(make: Make) -> None:
    """A new version of a service of one replica: the old one finishes what it has while the new one starts."""
    plane = await ready(make, "a")
    busy = plane.ask(4, 30)
    await plane.step(2)
    plane.replicas.names.discard("a")
    n_before = plane.replicas.all["a"].n_submits
    late = [plane.ask(4, 6) for _ in range(3)]
    for _ in range(8):
        await plane.step(1)
        await plane.pass_time(INTERVAL_S)
    assert [client.error for client in (busy, *late)] == [None] * 4
    assert plane.dispatcher.waiting_requests == 3
    assert plane.replicas.all["a"].n_submits == n_before
    plane.replicas.add(FarReplica("b"))
    await plane.poll()
    await plane.run_out()
    for client in (busy, *late):
        assert_undisturbed(client)
    plane.assert_idle()
