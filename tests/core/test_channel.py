"""One request's way out of the engine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orca_core.channel import Channel, Outbox
from orca_core.errors import RequestCancelledError
from orca_core.types import FinishReason, GenerationChunk


def chunk(text: str, *ids: int, finish: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk("r", text, ids, finish_reason=finish)


def test_a_late_reader_gets_one_chunk() -> None:
    channel = Channel("r", lambda _: None)
    channel.put(chunk("a", 1))
    channel.put(chunk("b", 2))
    assert channel.backlog == 2
    channel.put(chunk("c", 3, finish=FinishReason.STOP))
    assert list(channel) == [chunk("abc", 1, 2, 3, finish=FinishReason.STOP)]
    assert channel.backlog == 0


def test_chunks_before_an_error_are_delivered_and_then_it_is_raised() -> None:
    channel = Channel("r", lambda _: None)
    channel.put(chunk("a", 1))
    channel.fail(RequestCancelledError("r"))
    assert next(channel).text == "a"
    with pytest.raises(RequestCancelledError):
        next(channel)
    assert list(channel) == []


def test_nothing_is_said_after_the_end() -> None:
    channel = Channel("r", lambda _: None)
    channel.put(chunk("a", 1, finish=FinishReason.LENGTH))
    channel.put(chunk("b", 2))
    channel.fail(RequestCancelledError("r"))
    assert [part.text for part in channel] == ["a"]


def test_closing_cancels_once_and_only_an_unfinished_request() -> None:
    cancelled: list[str] = []
    channel = Channel("r", cancelled.append)
    channel.close()
    channel.close()
    assert cancelled == ["r"]
    done = Channel("d", cancelled.append)
    done.put(chunk("", finish=FinishReason.STOP))
    done.close()
    assert cancelled == ["r"]


def test_a_blocked_thread_is_woken() -> None:
    channel = Channel("r", lambda _: None)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(part.text for part in channel))
    reader.start()
    channel.put(chunk("a", 1))
    channel.put(chunk("b", 2, finish=FinishReason.STOP))
    reader.join(10)
    assert "".join(seen) == "ab"


async def test_async_readers_of_one_loop_are_woken_together() -> None:
    outbox, channels = Outbox(), [Channel(str(i), lambda _: None) for i in range(5)]
    loop = asyncio.get_running_loop()
    wakes = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wakes
        wakes += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    async def read(channel: Channel) -> str:
        return "".join([part.text async for part in channel])

    readers = [asyncio.create_task(read(channel)) for channel in channels]
    await asyncio.sleep(0)
    loop.call_soon_threadsafe = counting  # type: ignore[method-assign,assignment]
    try:
        writer = threading.Thread(target=_say, args=(outbox, channels))
        writer.start()
        texts = await asyncio.wait_for(asyncio.gather(*readers), 10)
        writer.join(10)
    finally:
        del loop.call_soon_threadsafe
    assert texts == ["ab"] * 5
    assert wakes == 2  # one an iteration, not one a stream


def _say(outbox: Outbox, channels: list[Channel]) -> None:
    for text, finish in (("a", None), ("b", FinishReason.STOP)):
        for channel in channels:
            outbox.put(channel, GenerationChunk(channel.request_id, text, (1,), finish_reason=finish))
        outbox.flush()


def test_readers_whose_event_loop_is_gone_are_cancelled() -> None:
    cancelled: list[str] = []
    channel, outbox = Channel("r", cancelled.append), Outbox()

    async def start_reading() -> None:
        task = asyncio.ensure_future(anext(channel))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(start_reading())
    outbox.put(channel, chunk("a", 1))
    outbox.flush()
    assert cancelled == ["r"]


async def test_a_listener_of_many_channels_polls_those_that_spoke() -> None:
    outbox, channels = Outbox(), [Channel(str(i), lambda _: None) for i in range(3)]
    ready: list[str] = []
    heard = asyncio.Event()
    for channel in channels:
        channel.listen(lambda name=channel.request_id: (ready.append(name), heard.set()))  # type: ignore[misc]
    writer = threading.Thread(target=_say, args=(outbox, channels[1:]))
    writer.start()
    writer.join(10)
    await asyncio.wait_for(heard.wait(), 10)
    await asyncio.sleep(0)
    assert set(ready) == {"1", "2"}
    said = channels[1].poll()
    assert said is not None
    assert (said.text, said.finish_reason) == ("ab", FinishReason.STOP)
    assert channels[1].poll() is None
    assert channels[0].poll() is None


async def test_a_listener_that_comes_late_is_told_and_hears_an_error_once() -> None:
    channel = Channel("r", lambda _: None)
    channel.put(chunk("a", 1))
    channel.fail(RequestCancelledError("r"))
    told: list[bool] = []
    channel.listen(lambda: told.append(True))
    await asyncio.sleep(0)
    assert told == [True]
    assert channel.poll() == chunk("a", 1)
    assert told == [True, True]  # the error waits behind it
    with pytest.raises(RequestCancelledError):
        channel.poll()
    assert channel.poll() is None
    assert told == [True, True]


async def test_a_closed_channel_tells_its_listener_nothing() -> None:
    channel = Channel("r", lambda _: None)
    told: list[bool] = []
    channel.listen(lambda: told.append(True))
    channel.close()
    assert channel.put(chunk("a", 1)) is None
    channel.wake()
    assert told == []
    assert channel.poll() is None
