"""Whatever the loop dies of, however broken the books are by then: all are told at once, and health says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orca_core.channel import Channel
from orca_core.errors import EngineDeadError, InternalError, InvariantError
from orca_core.iterations import Iteration
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, SamplingParams
from tests.core.builders import make_spec
from tests.core.engine_bench import Bench


class PanicError(BaseException):
    """As a panic in a Rust library comes: no ``Exception``."""


def assert_all_are_told(bench: Bench, channels: list[Channel]) -> None:
    for channel in channels:
        with pytest.raises(EngineDeadError):
            for _ in channel:
                pass
    health = bench.engine.health()
    assert not health.ok
    assert "died" in health.reason
    with pytest.raises(EngineDeadError):
        bench.engine.submit(make_spec(3, 5))


@pytest.mark.parametrize("kind", [PanicError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_no_kind_of_exception_kills_the_loop_silently(
    tokenizer: Tokenizer, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tokenizer)

    def raising(_: object) -> Any:
        raise kind

    monkeypatch.setattr(bench.executor, "run_iteration", raising)
    with bench.engine as engine:
        channels = engine.submit_all([make_spec(3, 5) for _ in range(8)])
        assert_all_are_told(bench, channels)


def break_release(bench: Bench) -> None:
    def release(_: str) -> None:
        raise InvariantError("the ledger is broken")

    bench.engine._loop._kv.release = release  # type: ignore[method-assign, union-attr]


def break_finish(bench: Bench) -> None:
    def finish(_: object) -> None:
        raise InvariantError("the pool is broken")

    bench.engine._loop._pool.finish = finish  # type: ignore[method-assign, union-attr]


def break_books(bench: Bench) -> None:
    def on_books(_: object) -> None:
        raise ValueError("books")

    bench.engine._loop._on_books = on_books  # type: ignore[union-attr]


@pytest.mark.parametrize("break_it", [break_release, break_finish, break_books])
def test_broken_books_keep_nobody_waiting(tokenizer: Tokenizer, break_it: Callable[[Bench], None]) -> None:
    bench = Bench(tokenizer)
    with bench.engine as engine:
        bench.executor.hold()
        channels = engine.submit_all([make_spec(3, 2) for _ in range(8)])
        bench.executor.wait_until_held()
        break_it(bench)
        bench.executor.let_go()
        assert_all_are_told(bench, channels)


def test_a_panic_over_one_token_ends_that_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine
    bench.executor.hold()
    bad, good = engine.submit_all([make_spec(3, 5), make_spec(3, 5)])
    bench.executor.wait_until_held()

    def panic(_: int) -> Any:
        raise PanicError

    monkeypatch.setattr(engine._loop._live[bad.request_id].text, "push", panic)  # type: ignore[union-attr]
    bench.executor.let_go()
    with pytest.raises(InternalError):
        list(bad)
    assert list(good)[-1].finish_reason is FinishReason.LENGTH
    assert engine.health().ok


def test_an_observer_that_raises_hurts_nobody(tokenizer: Tokenizer) -> None:
    def observe(_: Iteration) -> None:
        raise RuntimeError("a bug in somebody's metrics")

    bench = Bench(tokenizer, on_iteration=observe)
    with bench.engine as engine:
        assert len(engine.generate([[20]], SamplingParams(max_new_tokens=8))[0].token_ids) == 8
        assert engine.health().ok


def test_generate_is_no_stalled_reader(tokenizer: Tokenizer) -> None:
    """It reads one answer after the other, so the later ones pile up for as long as the first takes."""
    bench = Bench(tokenizer, max_stream_backlog=10)
    with bench.engine as engine:
        results = engine.generate([[20, 30], [40, 50]], SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert [len(result.token_ids) for result in results] == [60, 60]
