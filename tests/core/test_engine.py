"""The engine over an executor without a model: results, refusals, the waiting line."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from orca_core.admission import Admission
from orca_core.engine import Engine
from orca_core.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from orca_core.executor import LoadedModel
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, Load, SamplingParams
from tests.core.builders import make_spec
from tests.core.engine_bench import INFO, Bench, ids_of
from tests.core.fakes import VOCAB

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
    big = bench.engine._inbox.submit(make_spec(100, 61))  # the engine itself would refuse it
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
    admission = Admission(Load(n_slots=100), max_batch_size=1, max_waiting_requests=0, max_waiting_slots=None)
    for second in range(11):  # 10 slots each second
        admission.enter(f"r{second}", 10, float(second))
        admission.leave(f"r{second}", float(second))
    admission.enter("last", 10, 11.0)
    with pytest.raises(OverloadedError) as caught:
        admission.enter("late", 30, 11.0)
    assert caught.value.retry_after_s == pytest.approx(3.0)


def test_without_a_waiting_room_whoever_enters_has_his_slots(tokenizer: Tokenizer) -> None:
    """The books are those of the last iteration; what the loop has taken in since must not be forgotten."""
    made = Bench(tokenizer, max_waiting_requests=0, max_waiting_slots=0)
    with made.engine as engine:
        made.executor.hold()
        first = engine.submit(make_spec(10, 90))
        made.executor.wait_until_held()
        assert engine.load().headroom == INFO.n_slots - 100  # in an iteration whose books are not written yet
        with pytest.raises(OverloadedError):
            engine.submit(make_spec(10, 51))
        second = engine.submit(make_spec(10, 50))
        made.executor.let_go()
        assert [len(ids_of(channel)) for channel in (first, second)] == [90, 50]
        made.assert_idle()


def test_shared_slots_are_not_reserved_twice_at_the_door() -> None:
    """Two whose demands are more than the slots, but which share what they begin with, are both let in."""
    admission = Admission(Load(n_slots=100), max_batch_size=4, max_waiting_requests=0, max_waiting_slots=0)
    admission.enter("a", 60, 0.0)
    admission.take_in()
    admission.book(Load(n_slots=100, reserved_slots=60, running=1))
    admission.enter("b", 40, 0.0)
    admission.take_in()
    admission.book(Load(n_slots=100, reserved_slots=70, running=2))  # 30 of its slots were there
    admission.enter("c", 30, 0.0)
    with pytest.raises(OverloadedError):
        admission.enter("d", 1, 0.0)
