from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from deployment.headroom import REPORT_DELAY_S, SUSPECT_S, HeadroomBook
from deployment.router import HeadroomRouter, load_from_stats, load_to_stats
from orca_core.types import GenerationRequest, Load

IDLE = Load(n_slots=1000)
DEPLOYMENT = DeploymentID("Replica", "orca")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> HeadroomBook:
    return HeadroomBook(clock, random.Random(1), stale_after_s=5.0)


def reported(book: HeadroomBook, clock: Clock, **loads: Load) -> None:
    for replica, load in loads.items():
        book.report(replica, load, clock.now)


def test_requests_of_one_instant_take_turns(book: HeadroomBook, clock: Clock) -> None:
    """Field cases E1 and E3: eight at once over two idle replicas."""
    reported(book, clock, a=IDLE, b=IDLE)
    chosen = [book.reserve(f"r{i}", ["a", "b"], 50) for i in range(8)]
    assert sorted(chosen) == ["a"] * 4 + ["b"] * 4


def test_replicas_that_differ_a_little_take_turns(book: HeadroomBook, clock: Clock) -> None:
    """``n_slots`` is measured: no two pools are quite alike, and small requests must still spread."""
    reported(book, clock, a=Load(n_slots=1000), b=Load(n_slots=960))
    chosen = [book.reserve(f"r{i}", ["a", "b"], 10) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4


def test_the_replica_with_more_room_is_chosen(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=700), b=Load(n_slots=1000, reserved_slots=200))
    assert book.reserve("r", ["a", "b"], 50) == "b"


def test_waiting_demand_counts_like_reserved_demand(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, queued_slots=700), b=Load(n_slots=1000, reserved_slots=600))
    assert book.reserve("r", ["a", "b"], 50) == "b"


def test_a_replica_the_request_fits_goes_before_a_larger_free_share(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, small=Load(n_slots=100), large=Load(n_slots=1000, reserved_slots=500))
    assert book.rank(["small", "large"], 50)[0] == "small"
    assert book.rank(["small", "large"], 300)[0] == "large"


def test_ties_are_broken_at_random(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=IDLE, b=IDLE, c=IDLE)
    assert {book.rank(["a", "b", "c"], 1)[0] for _ in range(60)} == {"a", "b", "c"}


def test_a_report_that_knows_a_request_replaces_its_reservation(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=IDLE)
    book.reserve("r", ["a"], 300)
    assert book.headroom("a") == 700
    clock.now += REPORT_DELAY_S * 2
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=300))
    assert book.headroom("a") == 700  # once, not twice


def test_a_report_taken_too_early_to_know_a_request_does_not_replace_it(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=IDLE)
    book.reserve("r", ["a"], 300)
    clock.now += REPORT_DELAY_S / 2
    reported(book, clock, a=IDLE)
    assert book.headroom("a") == 700


def test_what_ended_since_the_report_is_free_again(book: HeadroomBook, clock: Clock) -> None:
    """Two requests right after a third one ended must land on two replicas, though the report still counts that one."""
    reported(book, clock, a=IDLE, b=IDLE)
    where = book.reserve("r", ["a", "b"], 300)
    clock.now += 1
    reported(book, clock, **{where: Load(n_slots=1000, reserved_slots=300)})
    clock.now += 0.1
    book.release("r", where)
    assert book.headroom(where) == 1000
    assert {book.reserve(f"s{i}", ["a", "b"], 20) for i in range(2)} == {"a", "b"}
    clock.now += 0.1
    reported(book, clock, a=IDLE, b=IDLE)
    assert book.headroom(where) <= 1000


def test_the_end_of_a_request_the_report_never_counted_frees_nothing(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=500))
    book.reserve("r", ["a"], 300)
    assert book.headroom("a") == 200
    book.release("r", "a")
    assert book.headroom("a") == 500


def test_an_older_report_changes_nothing(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=300))
    book.report("a", IDLE, clock.now - 1)
    assert book.headroom("a") == 700


def test_the_books_return_to_zero(book: HeadroomBook, clock: Clock) -> None:
    """Field case A5."""
    reported(book, clock, a=IDLE, b=IDLE)
    where = {f"r{i}": book.reserve(f"r{i}", ["a", "b"], 50) for i in range(20)}
    for request_id, replica in where.items():
        book.release(request_id, replica)
        book.release(request_id, replica)  # Serve may tell twice
    assert book.in_flight == 0
    assert book.headroom("a") == book.headroom("b") == 1000


def test_calls_that_share_an_id_are_booked_and_released_one_by_one(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=IDLE)
    book.reserve("parent", ["a"], 100)
    book.reserve("parent", ["a"], 200)
    assert book.headroom("a") == 700
    book.release("parent", "a")
    assert book.in_flight == 1
    book.release("parent", "a")
    assert book.headroom("a") == 1000


def test_without_reports_requests_are_spread(book: HeadroomBook) -> None:
    chosen = [book.reserve(f"r{i}", ["a", "b", "c"], 50) for i in range(9)]
    assert {replica: chosen.count(replica) for replica in "abc"} == {"a": 3, "b": 3, "c": 3}


def test_stale_reports_are_not_believed(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=990), b=IDLE)
    clock.now += 6.0
    chosen = [book.reserve(f"r{i}", ["a", "b"], 50) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4


def test_a_new_replica_counts_as_idle(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, old=Load(n_slots=1000, reserved_slots=500))
    assert book.rank(["old", "new"], 50)[0] == "new"


def test_a_replica_that_did_not_answer_is_last_until_it_reports_or_time_passes(
    book: HeadroomBook, clock: Clock
) -> None:
    full = Load(n_slots=1000, reserved_slots=1000)
    reported(book, clock, a=IDLE, b=full)
    book.suspect("a")
    assert book.rank(["a", "b"], 50) == ["b", "a"]
    clock.now += 1
    reported(book, clock, a=IDLE)
    assert book.rank(["a", "b"], 50) == ["a", "b"]
    book.suspect("a")
    clock.now += SUSPECT_S
    reported(book, clock, b=full)
    assert book.rank(["a", "b"], 50) == ["a", "b"]


def test_replicas_that_are_gone_are_forgotten(book: HeadroomBook, clock: Clock) -> None:
    reported(book, clock, a=Load(n_slots=1000, reserved_slots=500), b=IDLE)
    book.keep(["b"])
    assert book.headroom("a") == 0  # nothing is known of it


def test_a_load_survives_the_way_through_serve() -> None:
    load = Load(10, 9, 8, 7, 6, 5, 4, 3, 2)
    assert load_from_stats(load_to_stats(load, 12.5)) == (load, 12.5)
    assert load_from_stats({}) is None


# ---- in Serve's clothes


def a_replica(name: str, load: Load | None = None, taken_at: float = 1.0) -> Any:
    stats = {} if load is None else load_to_stats(load, taken_at)
    replica_id = ReplicaID(name, DEPLOYMENT)
    return SimpleNamespace(replica_id=replica_id, routing_stats=stats, max_ongoing_requests=10)


def pending(request_id: str, demand: int) -> Any:
    request = GenerationRequest(request_id, (1,), demand - 1, 0)
    return SimpleNamespace(args=[request, "mine"], metadata=SimpleNamespace(internal_request_id=request_id))


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> HeadroomRouter:
    async def no_probe(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(HeadroomRouter, "_probe_queue_lens", no_probe)
    made = HeadroomRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, initial_backoff_s=0.0, max_backoff_s=0.0)
    made.initialize_state(stale_after_s=1e12)
    return made


async def test_the_router_spreads_a_burst(router: HeadroomRouter) -> None:
    router.update_replicas([a_replica("a", IDLE), a_replica("b", IDLE)])
    chosen = await asyncio.gather(*(router._choose_replica_for_request(pending(f"r{i}", 40)) for i in range(64)))
    names = [replica.replica_id.unique_id for replica in chosen]
    assert names.count("a") == names.count("b") == 32


async def test_the_router_lets_go_of_what_has_ended(router: HeadroomRouter) -> None:
    router.update_replicas([a_replica("a", IDLE)])
    replica = await router._choose_replica_for_request(pending("r", 40))
    assert router._book.in_flight == 1
    router.on_request_completed(replica.replica_id, "r")
    assert router._book.in_flight == 0


async def test_a_request_waits_for_the_first_replica(router: HeadroomRouter) -> None:
    waiting = asyncio.create_task(router._choose_replica_for_request(pending("r", 40)))
    await asyncio.sleep(0)
    assert not waiting.done()
    router.update_replicas([a_replica("a")])
    assert (await waiting).replica_id.unique_id == "a"


async def test_a_request_cancelled_while_it_waits_leaves_no_trace(router: HeadroomRouter) -> None:
    waiting = asyncio.create_task(router._choose_replica_for_request(pending("r", 40)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    router.update_replicas([a_replica("a")])
    assert router._book.in_flight == 0


async def test_a_refused_request_is_not_bound_to_the_replica_that_refused(router: HeadroomRouter) -> None:
    busy = Load(n_slots=1000, reserved_slots=900)
    router.update_replicas([a_replica("a", IDLE), a_replica("b", busy)])
    names = set()
    for i in range(40):
        replica = await router._choose_replica_for_request(pending(f"r{i}", 10), is_retry=True)
        names.add(replica.replica_id.unique_id)
        router.on_request_completed(replica.replica_id, f"r{i}")
    assert names == {"a", "b"}


async def test_serves_own_interface_ranks_without_booking(router: HeadroomRouter) -> None:
    replicas = [a_replica("a", Load(n_slots=1000, reserved_slots=900)), a_replica("b", IDLE)]
    router.update_replicas(replicas)
    ranks = await router.choose_replicas(replicas, pending("r", 40))
    assert [[replica.replica_id.unique_id for replica in rank] for rank in ranks] == [["b"], ["a"]]
    assert router._book.in_flight == 0
