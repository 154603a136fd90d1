"""The engine over an executor without a model: cancelling and deadlines, in every state."""

from __future__ import annotations

import random
import threading

import pytest

from orca_core.channel import Channel
from orca_core.errors import (
    DeadlineExceededError,
    OrcaError,
    RequestCancelledError,
)
from orca_core.iterations import Iteration
from orca_core.tokenizer import Tokenizer
from orca_core.types import CancelOutcome, SamplingParams
from tests.core.builders import make_spec
from tests.core.engine_bench import Bench, ids_of

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
    first = bench.engine.submit(make_spec(3, 2))
    late = bench.engine.submit(make_spec(3, 2, request_id="late"))
    assert bench.engine.cancel("late") is CancelOutcome.CANCELLED
    bench.executor.let_go()
    with pytest.raises(RequestCancelledError):
        list(late)
    assert len(ids_of(first)) == 2
    bench.assert_idle()


def test_three_distinct_answers(bench: Bench) -> None:
    """Field case A12."""
    list(bench.engine.submit(make_spec(request_id="done")))
    assert bench.engine.cancel("done") is CancelOutcome.ALREADY_FINISHED
    assert bench.engine.cancel("never") is CancelOutcome.NOT_FOUND


@pytest.mark.parametrize("how", ["cancelled by id", "its channel closed"])
def test_who_leaves_too_late_spares_the_next_request_of_the_same_id(tokenizer: Tokenizer, how: str) -> None:
    """Between a request's last iteration and the moment its reader hears of it, its id is free again."""
    channels: list[Channel] = []

    def reuse(_: Iteration) -> None:
        if len(channels) == 1:
            channels.append(made.engine.submit(make_spec(3, 4, request_id="same")))
            if how == "its channel closed":
                channels[0].close()

    made = Bench(tokenizer, on_iteration=reuse)
    made.executor.hold()
    with made.engine:
        channels.append(made.engine.submit(make_spec(3, 1, request_id="same")))
        made.executor.wait_until_held()
        if how == "cancelled by id":
            assert made.engine.cancel("same") is CancelOutcome.CANCELLED
        made.executor.let_go()
        made.wait_for(lambda load: load.generated_tokens == 5)
        assert len(ids_of(channels[1])) == 4


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
