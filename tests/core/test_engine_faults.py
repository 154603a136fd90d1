"""The engine over an executor without a model: faults, health, and its own life."""

from __future__ import annotations

import gc
import pickle
import threading

import pytest

from orca_core.errors import (
    EngineClosedError,
    EngineDeadError,
    InternalError,
    RequestCancelledError,
)
from orca_core.stream import TextStream
from orca_core.tokenizer import Tokenizer
from orca_core.types import SamplingParams
from tests.core.builders import make_spec
from tests.core.engine_bench import Bench, ids_of

# ---- faults


def test_a_failed_iteration_ends_its_requests_and_the_loop_goes_on(bench: Bench) -> None:
    bench.executor.hold()
    channels = [bench.engine.submit(make_spec(3, 5)) for _ in range(2)]
    bench.executor.step()
    next(channels[0])
    bench.executor.errors = [RuntimeError("out of memory, secret prompt")]
    bench.executor.let_go()
    for channel in channels:
        with pytest.raises(InternalError) as caught:
            list(channel)
        assert "secret" not in str(caught.value)
    assert len(ids_of(bench.engine.submit(make_spec(3, 5)))) == 5
    assert bench.engine.health().ok
    bench.assert_idle()


def test_failures_without_end_kill_the_engine_and_everybody_hears_of_it(bench: Bench) -> None:
    """Field case D19: no waiter hangs, health says why, new requests are refused."""
    bench.executor.errors = [RuntimeError("boom") for _ in range(100)]
    bench.executor.hold()  # or the engine may be dead before the last of them is submitted
    channels = [bench.engine.submit(make_spec(3, 5)) for _ in range(30)]
    bench.executor.let_go()
    ends = []
    for channel in channels:
        with pytest.raises((InternalError, EngineDeadError)) as caught:
            list(channel)
        ends.append(type(caught.value))
    assert EngineDeadError in ends
    health = bench.engine.health()
    assert not health.ok
    assert "RuntimeError" in health.reason
    with pytest.raises(EngineDeadError):
        bench.engine.submit(make_spec())
    assert bench.engine.load().reserved_slots == 0


def test_logits_that_are_not_finite_end_one_request_alone(bench: Bench) -> None:
    bench.executor.broken = {"nan"}
    bench.executor.hold()
    bad, good = bench.engine.submit(make_spec(request_id="nan")), bench.engine.submit(make_spec())
    bench.executor.let_go()
    with pytest.raises(InternalError):
        list(bad)
    assert len(ids_of(good)) == 4
    bench.assert_idle()


def test_a_token_that_cannot_be_handed_on_ends_one_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TextStream.push

    def push(self: TextStream, token_id: int) -> object:
        if self._sampling.seed == 13:
            raise ValueError("cannot spell")
        return original(self, token_id)

    monkeypatch.setattr(TextStream, "push", push)
    bench.executor.hold()
    bad, good = bench.engine.submit(make_spec(sampling=SamplingParams(seed=13))), bench.engine.submit(make_spec())
    bench.executor.let_go()
    with pytest.raises(InternalError):
        list(bad)
    assert len(ids_of(good)) == 4
    bench.assert_idle()


def test_no_iteration_for_too_long_is_unwell_and_idleness_is_not(bench: Bench) -> None:
    bench.clock.now += 1000.0
    assert bench.engine.health().ok
    bench.executor.hold()
    channel = bench.engine.submit(make_spec())
    assert bench.engine.health().ok
    bench.clock.now += bench.engine.config.progress_timeout_s + 1
    assert "1 requests open" in bench.engine.health().reason
    bench.executor.let_go()
    list(channel)
    bench.assert_idle()
    assert bench.engine.health().ok


def test_closing_an_engine_that_hangs_does_not_wait_for_it(bench: Bench) -> None:
    """Field case F1: whoever replaces a replica gets its GPU only once it has ended."""
    bench.executor.hold()
    channel = bench.engine.submit(make_spec())
    bench.executor.wait_until_held()
    bench.clock.now += bench.engine.config.progress_timeout_s + 1
    closing = threading.Thread(target=bench.engine.close, daemon=True)
    closing.start()
    closing.join(20)
    still_closing = closing.is_alive()
    bench.executor.let_go()
    assert not still_closing
    with pytest.raises(EngineClosedError):
        list(channel)


def test_closing_waits_for_an_iteration_that_takes_its_time(bench: Bench) -> None:
    bench.executor.hold()
    channel = bench.engine.submit(make_spec())
    bench.executor.wait_until_held()
    bench.clock.now += bench.engine.config.progress_timeout_s - 1
    closing = threading.Thread(target=bench.engine.close, daemon=True)
    closing.start()
    closing.join(1.5)
    still_closing = closing.is_alive()
    bench.executor.let_go()
    assert still_closing
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(EngineClosedError):
        list(channel)


def test_a_device_that_is_lost_ends_the_engine_at_once(bench: Bench) -> None:
    """Whoever was on it can go on elsewhere then; another batch would fail like this one."""
    bench.executor.is_lost = True
    bench.executor.errors = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    bench.executor.hold()
    channels = [bench.engine.submit(make_spec(3, 5)) for _ in range(6)]
    bench.executor.let_go()
    for channel in channels:
        with pytest.raises(EngineDeadError):
            list(channel)
    assert not bench.engine.health().ok


def test_a_stalled_reader_is_cancelled_and_blocks_nobody(tokenizer: Tokenizer) -> None:
    """Field case B20."""
    made = Bench(tokenizer, max_stream_backlog=10)
    with made.engine as engine:
        stalled = engine.submit(make_spec(3, 100))
        assert len(engine.generate([[20]], SamplingParams(max_new_tokens=8))[0].token_ids) == 8
        made.assert_idle()
        assert len(next(stalled).token_ids) == 11  # what was said before is not lost
        with pytest.raises(RequestCancelledError):
            next(stalled)


# ---- life


def test_not_started_closed_and_started_twice(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer)
    for call in (lambda: made.engine.submit(make_spec()), lambda: made.engine.generate(["Hi"]), made.engine.info):
        with pytest.raises(EngineClosedError, match=r"call start\(\)") as refused:
            call()
        assert refused.value.retry_after_s is None
        assert pickle.loads(pickle.dumps(refused.value)).retry_after_s is None
    assert not made.engine.health().ok
    made.engine.start()
    with pytest.raises(EngineClosedError):
        made.engine.start()
    made.engine.close()
    made.engine.close()
    with pytest.raises(EngineClosedError):
        made.engine.submit(make_spec())
    with pytest.raises(EngineClosedError):
        made.engine.generate([[20]])


def test_close_fails_whoever_is_open(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer)
    made.engine.start()
    made.executor.hold()
    channels = [made.engine.submit(make_spec(3, 50)) for _ in range(6)]
    closer = threading.Thread(target=made.engine.close)
    closer.start()
    made.executor.let_go()
    closer.join(20)
    for channel in channels:
        with pytest.raises(EngineClosedError):
            list(channel)


def test_close_with_a_drain_lets_open_requests_end_and_takes_no_new_ones(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer)
    made.engine.start()
    made.executor.hold()
    channels = [made.engine.submit(make_spec(3, 10)) for _ in range(6)]
    closer = threading.Thread(target=made.engine.close, args=(60.0,))
    closer.start()
    while True:
        try:
            made.engine.submit(make_spec(request_id="probe")).close()
        except EngineClosedError:
            break
    made.executor.let_go()
    closer.join(20)
    assert [len(ids_of(channel)) for channel in channels] == [10] * 6


def test_an_engine_that_is_gone_holds_no_model(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer)
    made.engine.start().close()
    gc.collect()
    assert made.engine._model is None
    assert made.engine._loop is None
