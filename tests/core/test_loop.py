"""One turn of the loop after the other: ends in every state, faults, and what an idle loop has left behind."""

from __future__ import annotations

import pytest

from orca_core.errors import DeadlineExceededError, InternalError, InvariantError, RequestCancelledError
from orca_core.loop import AUDIT_INTERVAL_S, MAX_FAILED_ITERATIONS
from orca_core.stream import TextStream
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason
from tests.core.builders import make_spec
from tests.core.loop_bench import LoopBench


@pytest.fixture
def loop_bench(tokenizer: Tokenizer) -> LoopBench:
    return LoopBench(tokenizer)


def assert_nothing_left(bench: LoopBench) -> None:
    load = bench.loop.load()
    assert (load.reserved_slots, load.used_slots, load.queued_slots, load.running, load.waiting) == (0, 0, 0, 0, 0)
    assert bench.loop.idle
    bench.kv.check_integrity(idle=True)
    assert bench.executor.wrong == []


# ---- cancel and deadline, in every state (field cases A14, D13)


@pytest.mark.parametrize(("state", "n_turns"), [("queued", 0), ("initiation", 1), ("increment", 6)])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_end_in_every_state_frees_everything_without_another_iteration(
    loop_bench: LoopBench, state: str, n_turns: int, how: str
) -> None:
    name = loop_bench.submit(make_spec(100, 20, request_id="x", timeout_s=1000.0))
    for _ in range(n_turns):
        loop_bench.turn()
    load = loop_bench.loop.load()
    seen = {"queued": (1, 0), "initiation": (0, 32), "increment": (0, 102)}[state]
    assert (load.waiting, load.used_slots) == seen
    if how == "cancel":
        loop_bench.loop.cancel(name)
        assert_nothing_left(loop_bench)  # at once, with nobody else to be scheduled
    loop_bench.now += 1000.0
    assert loop_bench.turn() == []
    assert len(loop_bench.executor.batches) == n_turns
    assert_nothing_left(loop_bench)
    said, error = loop_bench.outcome(name)
    assert isinstance(error, RequestCancelledError if how == "cancel" else DeadlineExceededError)
    assert len(said.token_ids) == max(0, n_turns - 3)


def test_a_cancel_that_comes_as_the_last_token_does_is_too_late_and_harmless(loop_bench: LoopBench) -> None:
    name = loop_bench.submit(make_spec(3, 2))
    loop_bench.turn()
    loop_bench.turn()
    loop_bench.loop.cancel(name)
    loop_bench.turn()
    said, error = loop_bench.outcome(name)
    assert error is None
    assert said.finish_reason is FinishReason.LENGTH
    assert_nothing_left(loop_bench)


def test_a_cancelled_holder_of_shared_blocks_leaves_them_to_the_other(loop_bench: LoopBench) -> None:
    first = loop_bench.submit(make_spec(20, 8))
    loop_bench.turn()
    second = loop_bench.submit(make_spec(20, 8))
    loop_bench.turn()
    assert loop_bench.loop.load().reserved_slots == 28 + 28 - 16
    assert loop_bench.loop.load().unused_slots == 28 + 28 - 16 - loop_bench.loop.load().used_slots > 0
    loop_bench.loop.cancel(first)
    assert loop_bench.loop.load().reserved_slots == 28
    loop_bench.run()
    assert loop_bench.outcome(second)[0].finish_reason is FinishReason.LENGTH
    assert_nothing_left(loop_bench)
    assert loop_bench.loop.load().cached_slots == 24  # 20 + 7 tokens have K and V: six full blocks


def test_deadlines_of_requests_that_ended_are_not_kept(loop_bench: LoopBench) -> None:
    for _ in range(500):
        loop_bench.submit(make_spec(1, 1, timeout_s=1e6))
        loop_bench.run()
    assert len(loop_bench.loop._pool._deadlines) <= 65
    assert_nothing_left(loop_bench)


# ---- faults


def test_what_unsound_numbers_came_from_is_not_found_again(loop_bench: LoopBench) -> None:
    """Otherwise one bad block would end everybody who begins like this, for ever."""
    first = loop_bench.submit(make_spec(20, 8))
    loop_bench.turn()
    loop_bench.turn()
    loop_bench.executor.broken.add(first)
    loop_bench.turn()
    assert isinstance(loop_bench.outcome(first)[1], InternalError)
    assert loop_bench.loop.load().cached_slots == 0
    second = loop_bench.submit(make_spec(20, 8))
    loop_bench.run()
    said, error = loop_bench.outcome(second)
    assert error is None
    assert said.usage is not None
    assert said.usage.cached_prompt_tokens == 0


def test_pieces_of_a_prompt_are_shared_only_when_a_sound_token_followed(tokenizer: Tokenizer) -> None:
    bench = LoopBench(tokenizer, max_batch_tokens=8)
    bench.executor.broken.add("bad")
    bench.submit(make_spec(20, 8, request_id="bad"))
    bench.turn()
    good = bench.submit(make_spec(20, 8))
    bench.run()
    said, error = bench.outcome(good)
    assert error is None
    assert said.usage is not None
    assert said.usage.cached_prompt_tokens == 0
    assert_nothing_left(bench)


def test_after_a_failed_iteration_the_line_goes_on_with_a_clean_cache(tokenizer: Tokenizer) -> None:
    bench = LoopBench(tokenizer, fail_at={2}, max_batch_size=2)
    names = [bench.submit(make_spec(20, 6)) for _ in range(4)]
    bench.run()
    outcomes = [bench.outcome(name) for name in names]
    assert [type(error) for _, error in outcomes] == [InternalError, InternalError, type(None), type(None)]
    assert outcomes[2][0].token_ids == outcomes[3][0].token_ids
    assert outcomes[2][0].usage is not None
    assert outcomes[2][0].usage.cached_prompt_tokens == 0
    assert_nothing_left(bench)


def test_failures_in_a_row_give_the_engine_up_and_a_success_between_does_not(tokenizer: Tokenizer) -> None:
    bench = LoopBench(tokenizer, fail_at={0, 1, 3, 4}, max_batch_size=1)
    for _ in range(6):
        bench.submit(make_spec(3, 1))
    bench.run()
    assert_nothing_left(bench)
    bench = LoopBench(tokenizer, fail_at=range(MAX_FAILED_ITERATIONS), max_batch_size=1)
    for _ in range(6):
        bench.submit(make_spec(3, 1))
    with pytest.raises(RuntimeError, match="half-way"):
        bench.run()
    assert len(bench.executor.batches) == MAX_FAILED_ITERATIONS


def test_a_stream_that_cannot_be_made_ends_its_request_alone(
    loop_bench: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = loop_bench.submit(make_spec(3, 2))
    with monkeypatch.context() as patched:
        patched.setattr(TextStream, "resume", lambda *_: 1 / 0)
        bad = loop_bench.submit(make_spec(3, 2))
    loop_bench.run()
    assert isinstance(loop_bench.outcome(bad)[1], InternalError)
    assert loop_bench.outcome(good)[1] is None


def test_a_failure_after_a_request_has_ended_does_not_end_it_twice(
    loop_bench: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = loop_bench.loop._outbox.put, []

    def put(channel: object, chunk: object) -> None:
        original(channel, chunk)  # type: ignore[arg-type]
        if chunk.finish_reason is not None:  # type: ignore[attr-defined]
            failed.append(channel)
            raise OSError("no room")

    monkeypatch.setattr(loop_bench.loop._outbox, "put", put)
    name = loop_bench.submit(make_spec(3, 2))
    loop_bench.run()
    assert failed
    assert loop_bench.outcome(name)[1] is None
    assert_nothing_left(loop_bench)


def test_slots_that_nobody_will_return_are_noticed_before_they_block_the_line(loop_bench: LoopBench) -> None:
    loop_bench.kv.reserve("nobody", 150)
    loop_bench.submit(make_spec(10, 10))
    with pytest.raises(InvariantError, match="1 requests hold slots, 0 run"):
        loop_bench.turn()


def test_the_loop_audits_its_books_when_it_falls_idle(loop_bench: LoopBench) -> None:
    loop_bench.submit(make_spec(9, 2))
    loop_bench.run()
    store = loop_bench.kv._store
    digest = next(iter(store._block_of))
    store._block_of[digest] = store._blank[0]  # only a look at every block sees it
    loop_bench.loop.settle()
    loop_bench.now += AUDIT_INTERVAL_S
    with pytest.raises(InvariantError, match="index"):
        loop_bench.loop.settle()
    loop_bench.kv._n_used += 1
    with pytest.raises(InvariantError, match="idle"):
        loop_bench.loop.settle()
