"""What goes wrong before a request runs: while it is handed in, taken in, admitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orca_core import loop as loop_module
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import (
    EngineClosedError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    RequestTooLargeError,
)
from orca_core.executor import LoadedModel
from orca_core.pool import RequestPool
from orca_core.request import Request
from orca_core.tokenizer import Tokenizer
from orca_core.types import GenerationRequest, SamplingParams
from tests.core.builders import make_spec, make_state
from tests.core.engine_bench import INFO, Bench, ids_of
from tests.core.fakes import VOCAB
from tests.core.loop_bench import LoopBench

# ---- handed in


def with_(**changes: Any) -> Callable[[], object]:
    return lambda: replace(make_spec(3, 4), **changes)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: 5, "request"), (with_(request_id=7), "request_id"), (with_(sampling=None), "sampling"),
        (with_(token_ids=()), "prompt"), (with_(token_ids=[3, 4]), "prompt"), (with_(token_ids=(-1,)), "prompt"),
        (with_(token_ids=(3, VOCAB)), "prompt"), (with_(token_ids=(3, True)), "prompt"),
        (with_(token_ids=(3, 4.0)), "prompt"), (with_(token_ids=("a",)), "prompt"),
        (with_(emitted_ids=(VOCAB,)), "emitted_ids"), (with_(emitted_ids=[4]), "emitted_ids"),
        (with_(emitted_ids=(3, 3, 3, 3)), "emitted_ids"), (with_(max_new_tokens=0), "max_new_tokens"),
        (with_(max_new_tokens=2.5), "max_new_tokens"), (with_(max_new_tokens=True), "max_new_tokens"),
        (with_(max_new_tokens=126), "max_new_tokens"), (with_(seed=None), "seed"), (with_(timeout_s="x"), "timeout_s"),
        (with_(timeout_s=-1.0), "timeout_s"), (with_(sampling=SamplingParams(min_new_tokens=5)), "min_new_tokens"),
        (with_(sampling=SamplingParams(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    ],
)  # fmt: skip
def test_a_request_made_by_hand_is_checked_at_the_door(bench: Bench, make: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        bench.engine.submit(make())
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError):
        bench.engine.submit_all([make_spec(3, 4), make()])
    assert bench.engine.load().queued_slots == 0
    assert bench.executor.batches == []
    assert len(ids_of(bench.engine.submit(make_spec(3, 4)))) == 4


def test_the_slots_of_the_replica_count_too(bench: Bench) -> None:
    info = replace(INFO, max_model_len=1000)
    model = LoadedModel(bench.executor, bench.engine._model.tokenizer, info)  # type: ignore[union-attr]
    with Engine(bench.engine.config, model=model) as engine, pytest.raises(RequestTooLargeError, match="n_slots 160"):
        engine.submit(make_spec(100, 61))


def test_a_generation_that_began_elsewhere_goes_on(bench: Bench) -> None:
    params = SamplingParams(max_new_tokens=10, seed=1)
    (whole,) = bench.engine.generate([[20, 21]], params)
    request = bench.engine.make_request([20, 21], params, emitted_ids=whole.token_ids[:4])
    assert ids_of(bench.engine.submit(request)) == whole.token_ids[4:]
    for bad in ([VOCAB], whole.token_ids, 5, "abc"):
        with pytest.raises(InvalidRequestError, match="emitted_ids"):
            bench.engine.make_request([20, 21], params, emitted_ids=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda engine: engine.generate(None), "prompts"), (lambda engine: engine.generate("one"), "prompts"),
        (lambda engine: engine.generate([[20]], 5), "sampling"),
        (lambda engine: engine.generate([[20]], [5]), "sampling"),
        (lambda engine: engine.generate([[20]], []), "sampling"),
        (lambda engine: engine.make_request([20], sampling=5), "sampling"),
        (lambda engine: engine.make_request([20], sampling=0), "sampling"),
        (lambda engine: engine.cancel([]), "request_id"), (lambda engine: engine.submit_all(5), "requests"),
        (lambda engine: engine.close("x"), "drain_timeout_s"), (lambda engine: engine.close(-1), "drain_timeout_s"),
        (lambda engine: engine.close(float("nan")), "drain_timeout_s"),
    ],
)  # fmt: skip
def test_odd_arguments_are_named(bench: Bench, call: Callable[[Engine], object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(bench.engine)
    assert caught.value.field == field
    assert len(bench.engine.generate([[20]], SamplingParams(max_new_tokens=3))[0].token_ids) == 3


# ---- taken in


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_request_that_cannot_be_taken_in_ends_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def make(spec: GenerationRequest, at: float) -> Request:
        if spec.request_id == "bad":
            raise kind
        return Request(spec, at)

    monkeypatch.setattr(loop_module, "Request", make)
    good, bad, *more = bench.engine.submit_all(
        [make_spec(3, 4), make_spec(3, 4, request_id="bad"), make_spec(3, 4), make_spec(3, 4)]
    )
    with pytest.raises(InternalError):
        list(bad)
    assert [len(ids_of(channel)) for channel in (good, *more)] == [4] * 3
    bench.assert_idle()


def test_who_was_taken_along_with_the_loops_last_breath_is_told(bench: Bench) -> None:
    receive, n_received = bench.engine._loop.receive, 0  # type: ignore[union-attr]

    def die(*args: Any) -> None:
        nonlocal n_received
        n_received += 1
        if n_received == 2:
            raise MemoryError
        receive(*args)

    bench.engine._loop.receive = die  # type: ignore[method-assign, union-attr]
    channels = bench.engine.submit_all([make_spec(3, 4) for _ in range(4)])
    for channel in channels:
        with pytest.raises(EngineDeadError):
            list(channel)
    assert n_received == 2


# ---- admitted


def test_a_failing_admission_changes_nothing() -> None:
    pool, request = RequestPool(), make_state(3, 2)
    pool.add(request)
    with pytest.raises(Exception, match="cached"):
        pool.admit(request, 1.0, 99)
    pool.check_integrity()
    assert (pool.n_waiting, pool.n_running, pool.queued_slots) == (1, 0, 5)
    stranger = make_state(3, 2)
    for wrong in (lambda: pool.admit(stranger, 1.0), lambda: pool.finish(stranger)):
        with pytest.raises(Exception, match="request"):
            wrong()
    pool.check_integrity()
    pool.admit(request, 1.0)
    pool.finish(request)
    pool.check_integrity(idle=True)


@pytest.mark.parametrize("where", ["reserve", "cached_tokens", "admit"])
def test_a_request_that_cannot_be_admitted_ends_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bench = LoopBench(tokenizer)
    if where == "admit":
        original, owner = Request.admit, Request
    else:
        original, owner = getattr(bench.kv, where), bench.kv  # type: ignore[assignment]

    def fail(*args: Any) -> Any:
        if args[0] == "bad" or getattr(args[0], "request_id", "") == "bad":
            raise ValueError("no such thing")
        return original(*args)

    monkeypatch.setattr(owner, where, fail)
    names = [bench.submit(make_spec(3, 4, request_id=name)) for name in ("a", "bad", "c")]
    bench.run()
    errors = [bench.outcome(name)[1] for name in names]
    assert [type(error) for error in errors] == [type(None), InternalError, type(None)]
    bench.kv.check_integrity(idle=True)


@pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: [*tokens, *tokens], lambda _: None])
def test_a_wrong_number_of_tokens_fails_the_iteration_and_not_the_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], Any]
) -> None:
    bench = LoopBench(tokenizer)
    run = bench.executor.run_iteration
    names = [bench.submit(make_spec(3, 4)) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(bench.executor, "run_iteration", lambda batch: change(list(run(batch))))
        bench.turn()
    after = bench.submit(make_spec(3, 4))
    bench.run()
    assert all(isinstance(bench.outcome(name)[1], InternalError) for name in names)
    assert bench.outcome(after)[1] is None


# ---- progress


def test_turns_that_choose_nobody_are_no_progress(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine._loop._kv, "reserve", lambda *_: False)  # type: ignore[union-attr]
    channel = bench.engine.submit(make_spec(3, 4))
    bench.wait_for(lambda load: load.waiting == 1)
    bench.clock.now += bench.engine.config.progress_timeout_s + 1
    turned = threading.Event()
    monkeypatch.setattr(bench.engine._loop, "expire", turned.set)  # type: ignore[union-attr]
    for _ in range(2):  # a whole turn has passed after the second
        turned.clear()
        assert turned.wait(10)
    assert "1 requests open" in bench.engine.health().reason
    channel.close()
    bench.assert_idle()
    assert bench.engine.health().ok


def test_deadlines_that_pass_are_progress(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine._loop._kv, "reserve", lambda *_: False)  # type: ignore[union-attr]
    channels = bench.engine.submit_all([make_spec(3, 4), make_spec(3, 4, timeout_s=50.0)])
    bench.clock.now += bench.engine.config.progress_timeout_s + 1
    with pytest.raises(Exception, match="deadline"):
        list(channels[1])
    assert bench.engine.health().ok


# ---- life


def test_a_closed_engine_does_not_start(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig())
    engine.close()
    monkeypatch.setattr("orca_core.engine.load_engine_model", lambda _: pytest.fail("was loaded"))
    with pytest.raises(EngineClosedError, match="closed"):
        engine.start()


def test_an_engine_that_gets_no_thread_is_closed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench(tokenizer)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(EngineClosedError, match="can't start new thread"):
            made.engine.start()
    assert not made.engine.health().ok
    for call in (lambda: made.engine.submit(make_spec()), made.engine.start):
        with pytest.raises(EngineClosedError):
            call()
    assert made.engine._model is None
    made.engine.close()
