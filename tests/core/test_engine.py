"""The engine over an executor without a model: every way a request can live and end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from orca_core.admission import Admission
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    OrcaError,
    OverloadedError,
    RequestCancelledError,
    RequestTooLargeError,
)
from orca_core.executor import LoadedModel
from orca_core.stream import TextStream
from orca_core.tokenizer import Tokenizer
from orca_core.types import CancelOutcome, FinishReason, Load, ModelInfo, SamplingParams
from tests.core.builders import make_spec
from tests.core.fakes import VOCAB, FakeExecutor
from tests.core.tiny_tokenizers import byte_level_tokenizer

INFO = ModelInfo("fake", "Fake", "float32", VOCAB, 128, 160, (), False)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with all its strings in the test's hand."""

    def __init__(self, tokenizer: Tokenizer, **config: object) -> None:
        self.executor = FakeExecutor()
        self.clock = Clock()
        settings = {"max_batch_size": 4, "max_batch_tokens": 32, "block_size": 4, **config}
        self.engine = Engine(
            EngineConfig(**settings),  # type: ignore[arg-type]
            model=LoadedModel(self.executor, tokenizer, INFO),
            clock=self.clock,
        )

    def wait_for(self, seen: Callable[[Load], bool]) -> Load:
        """Until the books show something; the loop thread is at work meanwhile."""
        for _ in range(2000):
            load = self.engine.load()
            if seen(load):
                return load
            threading.Event().wait(0.005)
        raise AssertionError(f"never seen; the books show {self.engine.load()}")

    def assert_idle(self) -> None:
        load = self.wait_for(lambda load: load.running == load.waiting == 0)
        assert (load.reserved_slots, load.used_slots, load.queued_slots) == (0, 0, 0)
        assert self.engine.load().headroom == INFO.n_slots


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Iterator[Bench]:
    made = Bench(tokenizer)
    made.engine.start()
    yield made
    made.executor.let_go()
    made.engine.close()


def ids_of(channel: object) -> tuple[int, ...]:
    return tuple(token_id for chunk in channel for token_id in chunk.token_ids)  # type: ignore[attr-defined]


# ---- results


def test_many_prompts_equal_each_alone(bench: Bench) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(32)]
    params = [SamplingParams(max_new_tokens=rng.randint(1, 20)) for _ in prompts]
    together = bench.engine.generate(prompts, params)
    assert max(len(batch) for batch in bench.executor.batches) == 4
    for prompt, each, result in zip(prompts, params, together, strict=True):
        (alone,) = bench.engine.generate([prompt], each)
        assert (result.token_ids, result.text) == (alone.token_ids, alone.text)
        assert len(result.token_ids) == each.max_new_tokens
        assert result.usage.prompt_tokens == len(prompt)
    bench.assert_idle()


def test_a_result_says_why_it_ended_and_how_long_it_took(bench: Bench) -> None:
    (result,) = bench.engine.generate([[20, 21]], SamplingParams(max_new_tokens=3))
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 3)
    stop_id = result.token_ids[1]
    (stopped,) = bench.engine.generate([[20, 21]], SamplingParams(max_new_tokens=3, stop_token_ids=(stop_id,)))
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, result.token_ids[:2])


def test_one_token_is_exactly_one(bench: Bench) -> None:
    (result,) = bench.engine.generate([[20]], SamplingParams(max_new_tokens=1))
    assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.LENGTH)


def test_times_are_those_of_the_clock(bench: Bench) -> None:
    bench.executor.hold()
    channel = bench.engine.submit(make_spec(3, 2))
    bench.clock.now += 2.0
    bench.executor.step()
    first = next(channel)
    assert first.finish_reason is None
    bench.clock.now += 3.0
    bench.executor.step()
    last = next(channel)
    assert last.timings is not None
    assert (last.timings.ttft_s, last.timings.total_s) == (2.0, 5.0)


async def test_async_stream_and_early_leave(bench: Bench) -> None:
    """Field case A17: the left stream ends, and nobody sees another's tokens."""
    (whole,) = await asyncio.to_thread(bench.engine.generate, [[50, 51]], SamplingParams(max_new_tokens=30))
    stream = bench.engine.stream([50, 51], SamplingParams(max_new_tokens=100))
    first = await anext(stream)
    await stream.aclose()
    chunks = [chunk async for chunk in bench.engine.stream([50, 51], SamplingParams(max_new_tokens=30))]
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert first.token_ids[0] == whole.token_ids[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
    await asyncio.to_thread(bench.assert_idle)


# ---- refusals


def test_nothing_starts_when_one_prompt_of_several_is_bad(bench: Bench) -> None:
    """Field case C17."""
    for bad in ("", [], [VOCAB]):
        with pytest.raises(InvalidRequestError):
            bench.engine.generate([[20], bad, [21]], SamplingParams(max_new_tokens=2))
    assert bench.executor.batches == []


def test_exactly_all_slots_fit_and_one_more_is_refused(bench: Bench) -> None:
    info = replace(INFO, max_model_len=1000)
    model = LoadedModel(bench.executor, bench.engine._model.tokenizer, info)  # type: ignore[union-attr]
    with Engine(bench.engine.config, model=model) as engine:
        (result,) = engine.generate([[20] * 100], SamplingParams(max_new_tokens=60))
        assert len(result.token_ids) == 60
        with pytest.raises(RequestTooLargeError, match="161 is above n_slots 160"):
            engine.generate([[20] * 100], SamplingParams(max_new_tokens=61))


def test_one_that_never_fits_fails_alone_even_past_validation(bench: Bench) -> None:
    """Field case D1: it reached the pool, and the ten behind it run."""
    bench.executor.hold()
    running = bench.engine.submit(make_spec(5, 5))
    big = bench.engine.submit(make_spec(100, 61))
    small = [bench.engine.submit(make_spec(3, 3)) for _ in range(10)]
    bench.executor.let_go()
    with pytest.raises(RequestTooLargeError):
        list(big)
    assert [len(ids_of(channel)) for channel in (running, *small)] == [5] + [3] * 10
    bench.assert_idle()


def test_an_id_in_use_is_refused(bench: Bench) -> None:
    bench.executor.hold()
    channel = bench.engine.submit(make_spec(request_id="same"))
    with pytest.raises(InvalidRequestError, match="in use"):
        bench.engine.submit(make_spec(request_id="same"))
    bench.executor.let_go()
    assert len(ids_of(channel)) == 4
    assert len(ids_of(bench.engine.submit(make_spec(request_id="same")))) == 4


# ---- cancel and deadline


def test_cancel_of_a_running_request_frees_its_slots_by_the_next_iteration(bench: Bench) -> None:
    bench.executor.hold()
    channel = bench.engine.submit(make_spec(3, 50, request_id="run"))
    other = bench.engine.submit(make_spec(3, 3))
    bench.executor.step()
    next(channel)
    assert bench.engine.cancel("run") is CancelOutcome.CANCELLED
    bench.executor.step()  # was under way, or is the first without it
    bench.executor.step()
    with pytest.raises(RequestCancelledError):
        list(channel)
    bench.executor.let_go()
    assert len(ids_of(other)) == 3
    bench.assert_idle()
    assert sum(name == "run" for batch in bench.executor.batches for name, _ in batch) <= 3


def test_cancelled_while_queued_is_never_computed(bench: Bench) -> None:
    """Field case A10."""
    bench.executor.hold()
    running = [bench.engine.submit(make_spec(5, 30)) for _ in range(4)]
    bench.executor.step()
    queued = [bench.engine.submit(make_spec(5, 30, request_id=f"q{i}")) for i in range(20)]
    for channel in queued:
        channel.close()
    bench.executor.let_go()
    assert [len(ids_of(channel)) for channel in running] == [30] * 4
    bench.assert_idle()
    assert not any(name.startswith("q") for batch in bench.executor.batches for name, _ in batch)


def test_cancel_before_the_loop_has_seen_the_request(bench: Bench) -> None:
    bench.executor.hold()
    bench.engine.submit(make_spec(3, 2))
    late = bench.engine.submit(make_spec(3, 2, request_id="late"))
    assert bench.engine.cancel("late") is CancelOutcome.CANCELLED
    bench.executor.let_go()
    with pytest.raises(RequestCancelledError):
        list(late)
    bench.assert_idle()


def test_three_distinct_answers(bench: Bench) -> None:
    """Field case A12."""
    list(bench.engine.submit(make_spec(request_id="done")))
    assert bench.engine.cancel("done") is CancelOutcome.ALREADY_FINISHED
    assert bench.engine.cancel("never") is CancelOutcome.NOT_FOUND


def test_cancel_during_a_chunked_initiation(bench: Bench) -> None:
    bench.executor.hold()
    channel = bench.engine.submit(make_spec(100, 5, request_id="long"))
    bench.executor.step()
    bench.wait_for(lambda load: load.used_slots == 32)
    channel.close()
    bench.executor.let_go()
    bench.assert_idle()


def test_a_deadline_ends_running_and_queued_alike(bench: Bench) -> None:
    """Field case G7."""
    bench.executor.hold()
    running = [bench.engine.submit(make_spec(5, 30, timeout_s=1.0)) for _ in range(4)]
    queued = bench.engine.submit(make_spec(5, 30, request_id="queued", timeout_s=1.5))
    bench.executor.step()
    next(running[0])
    bench.clock.now += 2.0
    bench.executor.let_go()
    for channel in (*running, queued):
        with pytest.raises(DeadlineExceededError):
            list(channel)
    bench.assert_idle()
    assert not any(name == "queued" for batch in bench.executor.batches for name, _ in batch)


def test_random_cancels_leave_nothing(bench: Bench) -> None:
    """Field case A2."""
    rng = random.Random(3)
    ends: list[OrcaError | None] = []

    def one(seed: int) -> None:
        channel = bench.engine.submit(make_spec(rng.randint(1, 20), rng.randint(1, 30)))
        turns = random.Random(seed).randrange(6)
        try:
            for turn, _ in enumerate(channel):
                if turn == turns:
                    break
        finally:
            channel.close()
        ends.append(None)

    for round_ in range(10):
        threads = [threading.Thread(target=one, args=(round_ * 100 + i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(ends) == 200
    bench.assert_idle()
    (after,) = bench.engine.generate([[20, 21]], SamplingParams(max_new_tokens=5))
    assert len(after.token_ids) == 5


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
    channels = [bench.engine.submit(make_spec(3, 5)) for _ in range(30)]
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
    with pytest.raises(EngineClosedError):
        made.engine.submit(make_spec())
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


# ---- the waiting line


def test_the_waiting_line_is_bounded_in_requests(tokenizer: Tokenizer) -> None:
    """Field case J8: beyond it a request is refused at once, with a time to come back."""
    made = Bench(tokenizer, max_waiting_requests=3)
    with made.engine as engine:
        made.executor.hold()
        channels = [engine.submit(make_spec(3, 5)) for _ in range(4 + 3)]
        with pytest.raises(OverloadedError) as caught:
            engine.submit(make_spec(3, 5))
        assert 0.5 <= caught.value.retry_after_s <= 60
        made.executor.let_go()
        assert [len(ids_of(channel)) for channel in channels] == [5] * 7
        assert len(ids_of(engine.submit(make_spec(3, 5)))) == 5
        made.assert_idle()


def test_the_waiting_line_is_bounded_in_slots(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer, max_waiting_slots=0)
    with made.engine as engine:
        made.executor.hold()
        channels = [engine.submit(make_spec(10, 70)), engine.submit(make_spec(10, 70))]
        with pytest.raises(OverloadedError, match="slots"):
            engine.submit(make_spec(1, 1))
        made.executor.let_go()
        assert [len(ids_of(channel)) for channel in channels] == [70, 70]


def test_the_time_to_come_back_follows_the_rate_at_which_slots_return() -> None:
    admission = Admission(n_slots=100, max_batch_size=1, max_waiting_requests=0, max_waiting_slots=None)
    for second in range(11):  # 10 slots each second
        admission.enter(f"r{second}", 10, float(second))
        admission.leave(f"r{second}", float(second))
    admission.enter("last", 10, 11.0)
    with pytest.raises(OverloadedError) as caught:
        admission.enter("late", 30, 11.0)
    assert caught.value.retry_after_s == pytest.approx(3.0)
