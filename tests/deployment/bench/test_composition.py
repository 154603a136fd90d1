"""Who was at which place, and when a batch had ended."""

from __future__ import annotations

from deployment.bench.composition import compose, returned_s
from orca_core.iterations import Iteration, IterationPart


def iterations(*rows: str) -> list[Iteration]:
    """One a second; a capital letter: rows of a prompt."""
    return [
        Iteration(float(i), i + 1.0, tuple(IterationPart(c.lower(), 1, c.isupper()) for c in row))
        for i, row in enumerate(rows)
    ]


def test_a_newcomer_takes_the_lowest_free_place() -> None:
    made = compose(iterations("AB", "ab", "bC", "bcD", "d"))
    stays = {stay.request_id: (stay.place, stay.first_iteration, stay.last_iteration) for stay in made.stays}
    assert stays == {"a": (0, 0, 1), "b": (1, 0, 3), "c": (0, 2, 3), "d": (2, 3, 4)}
    assert [stay.request_id for stay in made.stays] == ["a", "b", "c", "d"]
    assert made.n_places == 3


def test_a_stay_has_its_initiation_and_its_end() -> None:
    (stay,) = compose(iterations("A", "A", "a", "a")).stays
    assert (stay.started_s, stay.initiated_s, stay.ended_s) == (0.0, 2.0, 4.0)


def test_a_request_level_client_waits_for_the_whole_batch() -> None:
    made = compose(iterations("AB", "b", "b", "CD", "d"))
    assert made.batch_ends_s == [3.0, 5.0]
    assert returned_s(made) == {"a": 3.0, "b": 3.0, "c": 5.0, "d": 5.0}
