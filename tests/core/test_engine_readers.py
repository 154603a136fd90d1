"""Who reads an engine's answers, and how readers leave: by ``with``, by letting go, by hurting their neighbours."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading

import pytest

from orca_core.channel import Channel, Outbox, Ticket
from orca_core.errors import InvalidRequestError, RequestCancelledError
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason, GenerationChunk
from tests.core.builders import make_spec
from tests.core.engine_bench import Bench, ids_of

# ---- leaving


def test_a_with_block_that_is_left_cancels_and_an_ended_one_does_not() -> None:
    cancelled: list[str] = []
    with Channel("left", cancelled.append) as channel:
        channel.put(GenerationChunk("left", "a", (1,)))
        assert next(channel).text == "a"
    with Channel("ended", cancelled.append) as channel:
        channel.put(GenerationChunk("ended", "a", (1,), finish_reason=FinishReason.STOP))
        assert [chunk.text for chunk in channel] == ["a"]
    assert cancelled == ["left"]


def test_a_channel_that_is_let_go_of_tells_once_and_only_before_its_end() -> None:
    dropped: list[Ticket] = []
    channels = [Channel(name, print, dropped.append) for name in ("open", "ended", "failed", "closed")]
    channels[1].put(GenerationChunk("ended", "a", (1,), finish_reason=FinishReason.STOP))
    channels[2].fail(RequestCancelledError("failed"))
    channels[3].close()
    del channels
    gc.collect()
    assert [(ticket.request_id, ticket()) for ticket in dropped] == [("open", None)]


@pytest.mark.parametrize("how", ["return", "cycle"])
def test_a_dropped_channel_ends_its_request(bench: Bench, how: str) -> None:
    """Field case A17: running, waiting and not yet received requests alike."""
    bench.executor.hold()

    def leave() -> None:
        channels = bench.engine.submit_all([make_spec(3, 100) for _ in range(4)])
        bench.executor.step()
        assert next(channels[0]).token_ids
        channels += bench.engine.submit_all([make_spec(3, 100) for _ in range(2)])
        if how == "cycle":
            channels[0].cycle = channels  # type: ignore[attr-defined]

    leave()
    gc.collect()
    kept = bench.engine.submit(make_spec(3, 3))
    bench.executor.let_go()
    assert len(ids_of(kept)) == 3
    bench.assert_idle()
    assert len(bench.executor.batches) < 10
    assert not bench.engine._inbox._dropped


def test_a_channel_dropped_after_its_end_spares_the_next_request_of_its_id(bench: Bench) -> None:
    for _ in range(3):
        channel = bench.engine.submit(make_spec(3, 4, request_id="same"))
        assert len(ids_of(channel)) == 4
    ended = channel
    bench.executor.hold()
    channel = bench.engine.submit(make_spec(3, 4, request_id="same"))
    del ended
    gc.collect()
    bench.executor.let_go()
    assert len(ids_of(channel)) == 4


def test_what_was_refused_leaves_nothing_behind(bench: Bench) -> None:
    bench.executor.hold()
    kept = bench.engine.submit(make_spec(3, 2, request_id="same"))
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="in use"):
            bench.engine.submit(make_spec(3, 2, request_id="same"))
    gc.collect()
    assert not bench.engine._inbox._dropped
    bench.executor.let_go()
    assert len(ids_of(kept)) == 2


def test_a_drop_needs_no_lock(bench: Bench) -> None:
    """The collector runs in any thread, also in one that holds the inbox, while another waits for it."""
    bench.executor.hold()
    keep = [bench.engine.submit(make_spec(3, 2)), bench.engine.submit(make_spec(3, 100))]
    bench.executor.wait_until_held()
    inbox, dropped = bench.engine._inbox, threading.Event()

    def drop() -> None:
        keep.pop()
        dropped.set()

    with inbox._wakeup:
        other = threading.Thread(target=drop)
        other.start()
        assert dropped.wait(10)
    other.join(10)
    bench.executor.let_go()
    assert len(ids_of(keep[0])) == 2
    bench.assert_idle()


async def test_a_task_that_nobody_holds_but_the_engine_is_still_told() -> None:
    channel = Channel("r", print)
    ticket, said = channel.ticket, asyncio.get_running_loop().create_future()

    async def read(channel: Channel) -> None:
        said.set_result([chunk.text async for chunk in channel])

    asyncio.create_task(read(channel))  # noqa: RUF006
    del channel
    await asyncio.sleep(0)
    gc.collect()
    again = ticket()
    assert again is not None
    outbox = Outbox()
    outbox.put(again, GenerationChunk("r", "a", (1,), finish_reason=FinishReason.STOP))
    del again
    outbox.flush()
    assert await asyncio.wait_for(said, 10) == ["a"]
    gc.collect()
    assert ticket() is None


# ---- neighbours


async def test_a_listener_that_raises_leaves_the_others_their_wake_up(caplog: pytest.LogCaptureFixture) -> None:
    outbox, channels = Outbox(), [Channel(str(i), print) for i in range(3)]
    heard: list[str] = []

    def broken() -> None:
        raise RuntimeError("a bug in somebody's listener")

    channels[0].listen(broken)
    for channel in channels[1:]:
        channel.listen(lambda name=channel.request_id: heard.append(name))  # type: ignore[misc]
    for channel in channels:
        outbox.put(channel, GenerationChunk(channel.request_id, "a", (1,)))
    outbox.flush()
    await asyncio.sleep(0)
    assert heard == ["1", "2"]
    assert "listener of request 0" in caplog.text


def test_a_word_that_cannot_be_delivered_keeps_no_other_from_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, channels = Outbox(), [Channel(str(i), print) for i in range(3)]
    monkeypatch.setattr(channels[0], "put", lambda _: 1 / 0)
    for channel in channels:
        outbox.put(channel, GenerationChunk(channel.request_id, "a", (1,)))
    with pytest.raises(ZeroDivisionError):
        outbox.flush()
    assert [channel.backlog for channel in channels] == [0, 1, 1]


# ---- stalled


def test_a_stalled_reader_is_told_by_how_much_and_which_setting_says_so(tokenizer: Tokenizer) -> None:
    made = Bench(tokenizer, max_stream_backlog=10)
    with made.engine as engine:
        stalled = engine.submit(make_spec(3, 100))
        made.wait_for(lambda load: load.generated_tokens >= 11)
        made.assert_idle()
        next(stalled)
        with pytest.raises(RequestCancelledError, match="11 tokens behind, max_stream_backlog is 10") as caught:
            next(stalled)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.code, str(copy)) == ("cancelled", str(caught.value))
        assert str(copy) != str(RequestCancelledError(stalled.request_id))
