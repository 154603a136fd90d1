"""Which replica has the most room where other ingresses send to it too."""

from __future__ import annotations

from deployment.headroom import HeadroomBook
from orca_core.types import Load
from tests.deployment.headroom_rig import IDLE, Teller, book, clock, full, send, tell
from tests.deployment.plane import Clock

__all__ = ["book", "clock", "tell"]


def test_news_of_others_counts_once_all_replicas_have_told_theirs(book: HeadroomBook, tell: Teller) -> None:
    """In this instant others send as much to all; who has said so already is no fuller than the rest."""
    tell(a=IDLE, b=IDLE)
    book.survey({"a": IDLE, "b": IDLE}, 50.0)
    tell(a=full(6))
    chosen = [send(book, f"r{i}", ["a", "b"], 10) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4
    book.survey({"a": full(10), "b": full(4)}, 50.0)
    assert book.best(["a", "b"], 10) == "b"


def test_what_others_have_no_more_counts_at_once(book: HeadroomBook, tell: Teller, clock: Clock) -> None:
    """Ends are told to everybody when they happen; only what has begun is told by some sooner than by others."""
    tell(a=full(10), b=full(4))
    asked_at = clock.now
    clock.now += 0.1
    tell(a=IDLE)  # while the answers to the survey are on their way
    book.survey({"a": full(10), "b": full(4)}, asked_at)
    tell(b=IDLE)
    chosen = [send(book, f"r{i}", ["a", "b"], 10) for i in range(8)]
    assert chosen.count("a") == chosen.count("b") == 4


def test_what_is_ours_is_not_taken_for_that_of_others(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE, b=IDLE)
    for number in range(3):
        book.book(f"a{number}", "a", 10)
        book.confirm(f"a{number}", number + 1)
    book.survey({"a": full(3), "b": full(2)}, 50.0)
    tell(a=full(3), n_accepted=3)
    tell(b=full(2))
    assert book.best(["a", "b"], 10) == "b"
    book.release("a0")
    book.release("a1")
    tell(a=full(1), n_accepted=3)
    assert book.best(["a", "b"], 10) == "a"


def test_there_is_room_only_where_the_latest_report_says_so(book: HeadroomBook, tell: Teller) -> None:
    book.survey({"a": IDLE, "b": full(50)}, 50.0)
    tell(a=full(99), b=full(50))
    assert book.best(["a", "b"], 20) == "b"


def test_what_the_cache_shares_counts_once(book: HeadroomBook, tell: Teller) -> None:
    tell(a=IDLE, b=full(40))
    for number in range(8):
        book.book(f"a{number}", "a", 100)
        book.confirm(f"a{number}", number + 1)
    shared = Load(n_slots=1000, reserved_slots=200, running=8)
    book.survey({"a": shared, "b": full(40)}, 50.0)
    tell(a=shared, n_accepted=8)
    assert book.best(["a", "b"], 10) == "a"
