"""Which replica has the most room, by the books."""

from __future__ import annotations

import random

import pytest

from deployment.headroom import LESS_FREE, SUSPECT_S, HeadroomBook
from deployment.parcels import Standing
from orca_core.types import Load
from tests.deployment.headroom_rig import IDLE, Teller, book, clock, send, tell
from tests.deployment.plane import Clock

__all__ = ["book", "clock", "tell"]


def test_requests_of_one_instant_take_turns(book: HeadroomBook, tell: Teller) -> None:
    """Field cases E1 and E3: eight at once over two idle replicas."""
    tell(a=IDLE, b=IDLE)
    chosen = [send(book, f"r{i}", ["a", "b"], 50) for i in range(8)]
    assert sorted(chosen) == ["a"] * 4 + ["b"] * 4


def test_replicas_that_differ_a_little_take_turns(book: HeadroomBook, tell: Teller) -> None:
    """``n_slots`` is measured: no two pools are quite alike, and small requests must still spread."""
    tell(a=Load(n_slots=1000), b=Load(n_slots=960))
    chosen = [send(book, f"r{i}", ["a", "b"], 10) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4


def test_the_replica_with_more_room_is_chosen(book: HeadroomBook, tell: Teller) -> None:
    tell(a=Load(n_slots=1000, reserved_slots=700), b=Load(n_slots=1000, reserved_slots=200))
    assert book.best(["a", "b"], 50) == "b"


def test_waiting_demand_counts_like_reserved_demand(book: HeadroomBook, tell: Teller) -> None:
    tell(a=Load(n_slots=1000, queued_slots=700), b=Load(n_slots=1000, reserved_slots=600))
    assert book.best(["a", "b"], 50) == "b"


def test_one_that_has_no_room_is_not_chosen_however_free(book: HeadroomBook, tell: Teller) -> None:
    """Field case E9."""
    tell(small=Load(n_slots=100), large=Load(n_slots=1000, reserved_slots=500))
    assert book.best(["small", "large"], 50) == "small"
    assert book.best(["small", "large"], 300) == "large"
    assert book.best(["small", "large"], 501) is None


def test_places_in_the_batch_are_room_too(clock: Clock) -> None:
    book = HeadroomBook(clock, 4, random.Random(1))
    tell = Teller(book)
    tell(a=Load(n_slots=1000, reserved_slots=100, running=3), b=Load(n_slots=1000, reserved_slots=500, running=1))
    assert book.best(["a", "b"], 10) == "b"
    tell(b=Load(n_slots=1000, reserved_slots=500, running=3, waiting=1))
    assert send(book, "r", ["a", "b"], 10) == "a"
    assert book.best(["a", "b"], 10) is None


def test_ties_are_broken_at_random(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE, b=IDLE, c=IDLE)
    assert {book.best(["a", "b", "c"], 1) for _ in range(60)} == {"a", "b", "c"}


def test_a_report_that_knows_a_request_replaces_its_booking(book: HeadroomBook, tell: Teller) -> None:
    """By number, not by time: the machines' clocks don't matter."""
    tell(a=IDLE)
    book.book("r", "a", 300)
    assert book.headroom("a") == 700
    book.confirm("r", 1)
    assert book.headroom("a") == 700
    tell(a=IDLE)  # taken before the request came
    assert book.headroom("a") == 700
    tell(1, a=Load(n_slots=1000, reserved_slots=300))
    assert book.headroom("a") == 700  # once, not twice


def test_a_report_may_come_before_the_acceptance_it_knows_of(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE)
    book.book("r", "a", 300)
    tell(1, a=Load(n_slots=1000, reserved_slots=300))
    assert book.headroom("a") == 400  # twice for a moment: too careful, never too bold
    book.confirm("r", 1)
    assert book.headroom("a") == 700


def test_an_end_frees_slots_when_the_replica_says_so(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE)
    book.book("r", "a", 300)
    book.confirm("r", 1)
    tell(1, a=Load(n_slots=1000, reserved_slots=300))
    tell(1, a=IDLE)  # comes with the last word
    book.release("r")
    assert book.headroom("a") == 1000
    assert book.in_flight == 0


def test_one_that_was_never_accepted_frees_its_booking_at_once(book: HeadroomBook, tell: Teller) -> None:
    tell(a=Load(n_slots=1000, reserved_slots=500))
    book.book("r", "a", 300)
    assert book.headroom("a") == 200
    book.release("r")
    book.release("r")
    assert book.headroom("a") == 500


def test_an_older_report_changes_nothing(book: HeadroomBook) -> None:
    book.report("a", Standing(Load(n_slots=1000, reserved_slots=300), 5.0, 0))
    book.report("a", Standing(IDLE, 4.0, 9))
    assert book.headroom("a") == 700


def test_one_that_refused_is_left_alone_until_it_says_how_it_stands(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE, b=Load(n_slots=1000, reserved_slots=900))
    book.refuse("a")
    assert book.best(["a", "b"], 50) == "b"
    assert book.best(["a"], 50) is None
    tell(a=IDLE)
    assert book.best(["a", "b"], 50) == "a"


def test_one_that_did_not_answer_is_last_until_it_says_how_it_stands_or_time_passes(
    book: HeadroomBook, tell: Teller, clock: Clock
) -> None:
    tell(a=IDLE, b=Load(n_slots=1000, reserved_slots=900))
    book.suspect("a")
    assert book.best(["a", "b"], 50) == "b"
    assert book.best(["a", "b"], 500) == "a"  # better than nobody
    tell(a=IDLE)
    assert book.best(["a", "b"], 50) == "a"
    book.suspect("a")
    clock.now += SUSPECT_S
    assert book.best(["a", "b"], 50) == "a"


def test_a_replica_that_answers_but_computes_nothing_is_chosen_last(book: HeadroomBook) -> None:
    """Only its loop hangs: its reports go on, and say that it has work and is where it was."""
    stuck, busy = Load(n_slots=1000, running=1, iterations=7), Load(n_slots=1000, reserved_slots=900, running=9)
    for at in (1.0, 5.9):
        book.report("a", Standing(stuck, at, 0))
        book.report("b", Standing(busy, 1.0, 0))
        assert book.best(["a", "b"], 50) == "a"
    book.report("a", Standing(stuck, 6.1, 0))
    assert book.best(["a", "b"], 50) == "b"
    assert book.best(["a", "b"], 500) == "a"  # better than nobody
    book.report("a", Standing(Load(n_slots=1000, running=1, iterations=8), 6.2, 0))
    assert book.best(["a", "b"], 50) == "a"


def test_a_replica_that_has_nothing_to_do_stands_still_for_as_long_as_it_likes(book: HeadroomBook) -> None:
    for at in (1.0, 100.0):
        book.report("a", Standing(Load(n_slots=1000, iterations=7), at, 0))
    book.report("b", Standing(Load(n_slots=1000, reserved_slots=900), 1.0, 0))
    assert book.best(["a", "b"], 50) == "a"
    book.report("a", Standing(Load(n_slots=1000, iterations=7, running=1), 100.5, 0))  # its first iteration is running
    assert book.best(["a", "b"], 50) == "a"


def test_stale_reports_are_not_believed(book: HeadroomBook, tell: Teller, clock: Clock) -> None:
    tell(a=Load(n_slots=1000, reserved_slots=990), b=IDLE)
    clock.now += 6.0
    chosen = [send(book, f"r{i}", ["a", "b"], 50) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4


def test_nobody_is_sent_to_one_that_has_said_nothing(book: HeadroomBook, tell: Teller) -> None:
    tell(a=Load(n_slots=1000, reserved_slots=900))
    assert book.best(["a", "new"], 50) == "a"


def test_a_replica_that_is_gone_is_forgotten_with_all_that_was_on_it(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE, b=IDLE)
    book.book("r", "a", 300)
    book.book("s", "b", 100)
    book.forget("a")
    assert book.in_flight == 1
    book.release("r")
    book.confirm("r", 1)
    assert book.best(["a", "b"], 50) == "b"


def test_the_books_return_to_zero(book: HeadroomBook, tell: Teller) -> None:
    """Field case A5."""
    tell(a=IDLE, b=IDLE)
    for i in range(20):
        send(book, f"r{i}", ["a", "b"], 50)
    for i in range(20):
        book.release(f"r{i}")
    assert book.in_flight == 0
    assert book.headroom("a") == book.headroom("b") == 1000


def test_an_affinity_goes_to_the_same_replica_while_that_is_not_much_fuller(book: HeadroomBook, tell: Teller) -> None:
    names = ["a", "b", "c"]
    tell(a=IDLE, b=IDLE, c=IDLE)
    homes = {key: book.best(names, 10, key) for key in (b"%d" % i for i in range(30))}
    assert set(homes.values()) == set(names)
    home = homes[b"0"]
    assert home is not None
    tell(**{home: Load(n_slots=1000, reserved_slots=int(1000 * LESS_FREE))})
    assert book.best(names, 10, b"0") == home
    tell(**{home: Load(n_slots=1000, reserved_slots=int(1000 * LESS_FREE) + 1)})
    assert book.best(names, 10, b"0") != home
    # whoever lived elsewhere does not move because one replica is gone
    others = [name for name in names if name != home]
    assert all(book.best(others, 10, key) == old for key, old in homes.items() if old != home)


def test_how_long_an_iteration_takes_is_seen_from_the_reports(book: HeadroomBook) -> None:
    assert book.iteration_s == 0.0
    book.report("a", Standing(Load(n_slots=10, running=1, iterations=10), 1.0, 0))
    book.report("a", Standing(Load(n_slots=10, iterations=14), 1.2, 0))
    assert book.iteration_s == pytest.approx(0.05)
    book.report("a", Standing(Load(n_slots=10, iterations=15), 99.0, 0))  # it was idle in between
    assert book.iteration_s == pytest.approx(0.05)
