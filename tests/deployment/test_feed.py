from __future__ import annotations

import asyncio

import pytest

from deployment.feed import Feed, ReplicaLostError
from orca_core.errors import RequestCancelledError
from orca_core.types import FinishReason, GenerationChunk
from tests.deployment.plane import Clock


def chunk(text: str, *ids: int, finish: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk("r", text, ids, finish_reason=finish)


async def test_who_reads_late_gets_it_in_one() -> None:
    feed = Feed(100, Clock())
    assert feed.put(chunk("a", 1))
    assert feed.put(chunk("b", 2))
    assert await feed.next() == chunk("ab", 1, 2)


async def test_a_reader_waits() -> None:
    feed = Feed(100, Clock())
    reader = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    assert not reader.done()
    feed.put(chunk("a", 1))
    assert await reader == chunk("a", 1)


async def test_a_reader_who_left_is_not_waked() -> None:
    feed = Feed(100, Clock())
    reader = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    reader.cancel()
    assert feed.put(chunk("a", 1))  # in the same instant
    feed.fail(ReplicaLostError("x"))
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await feed.next() == chunk("a", 1)


async def test_what_came_before_an_error_is_delivered_first() -> None:
    feed = Feed(100, Clock())
    feed.put(chunk("a", 1))
    feed.fail(ReplicaLostError("x"))
    assert await feed.next() == chunk("a", 1)
    with pytest.raises(ReplicaLostError):
        await feed.next()


async def test_an_end_that_came_first_wins() -> None:
    feed = Feed(100, Clock())
    feed.put(chunk("a", 1, finish=FinishReason.STOP))
    feed.fail(ReplicaLostError("x"))
    assert feed.put(chunk("b", 2))
    assert (await feed.next()).text == "a"
    failed = Feed(100, Clock())
    failed.fail(RequestCancelledError("r"))
    failed.fail(ReplicaLostError("x"))
    with pytest.raises(RequestCancelledError):
        await failed.next()


async def test_the_backlog_is_bounded_in_tokens() -> None:
    feed = Feed(3, Clock())
    assert feed.put(chunk("ab", 1, 2))
    assert not feed.put(chunk("cd", 3, 4))
    assert await feed.next() == chunk("ab", 1, 2)
    assert feed.put(chunk("cd", 3, 4))


async def test_times_are_those_of_arrival_not_of_reading() -> None:
    clock = Clock(1.0)
    feed = Feed(100, clock)
    feed.put(chunk("a", 1))
    clock.now = 3.0
    feed.put(chunk("b", 2, finish=FinishReason.STOP))
    clock.now = 9.0
    await feed.next()
    assert (feed.first_at, feed.last_at) == (1.0, 3.0)
