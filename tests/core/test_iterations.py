"""What an observer sees of the iterations, and that submissions made together are chosen together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orca_core.errors import InvalidRequestError, OverloadedError
from orca_core.iterations import Iteration, IterationPart
from orca_core.tokenizer import Tokenizer
from tests.core.builders import make_spec
from tests.core.engine_bench import Bench, ids_of


@pytest.fixture
def seen() -> list[Iteration]:
    return []


@pytest.fixture
def watched(tokenizer: Tokenizer, seen: list[Iteration]) -> Iterator[Bench]:
    made = Bench(tokenizer, on_iteration=seen.append, max_batch_tokens=6, max_waiting_requests=0)
    made.engine.start()
    yield made
    made.executor.let_go()
    made.engine.close()


def test_an_observer_sees_time_rows_and_phase_of_every_request(watched: Bench, seen: list[Iteration]) -> None:
    watched.executor.hold()
    channels = watched.engine.submit_all([make_spec(2, 2, request_id="a"), make_spec(7, 1, request_id="b")])
    watched.clock.now = 200.0
    watched.executor.step(3)
    assert [len(ids_of(channel)) for channel in channels] == [2, 1]
    watched.assert_idle()
    assert [iteration.parts for iteration in seen] == [
        (IterationPart("a", 2, True), IterationPart("b", 4, True)),
        (IterationPart("a", 1, False), IterationPart("b", 3, True)),
    ]
    assert [iteration.n_tokens for iteration in seen] == [6, 4]
    assert seen[0].ended_s == 200.0
    assert seen[1].seconds == 0.0


def test_an_iteration_that_fails_is_not_seen(watched: Bench, seen: list[Iteration]) -> None:
    watched.executor.errors = [RuntimeError("device")]
    (failed,) = watched.engine.submit_all([make_spec(2, 1)])
    with pytest.raises(Exception, match="internal"):
        ids_of(failed)
    assert len(ids_of(watched.engine.submit(make_spec(2, 1)))) == 1
    watched.assert_idle()
    assert len(seen) == 1


def test_what_is_submitted_together_is_in_one_batch(watched: Bench) -> None:
    for _ in range(20):
        watched.executor.batches.clear()
        channels = watched.engine.submit_all([make_spec(1, 1) for _ in range(4)])
        assert [len(ids_of(channel)) for channel in channels] == [1] * 4
        assert [len(batch) for batch in watched.executor.batches] == [4]
        watched.assert_idle()


@pytest.mark.parametrize(
    ("names", "error"), [(["a", "b", "a"], InvalidRequestError), (["a", "b", "c", "d", "e"], OverloadedError)]
)
def test_where_one_of_many_is_refused_none_runs(watched: Bench, names: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        watched.engine.submit_all([make_spec(2, 3, request_id=name) for name in names])
    watched.assert_idle()
    assert watched.executor.batches == []
