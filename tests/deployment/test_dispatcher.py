"""The serving plane in virtual time: who is sent where, in which order."""

from __future__ import annotations

from tests.deployment.far_replicas import FarReplica
from tests.deployment.plane import replicas_of, settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready, where

__all__ = ["make"]


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
