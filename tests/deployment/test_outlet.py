"""A replica's end of the stream to one ingress, over real channels and without an engine."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator

import pytest

from deployment.outlet import Outlet
from deployment.parcels import Parcel, pack, unpack
from orca_core.channel import Channel, Outbox
from orca_core.errors import DeadlineExceededError, RequestCancelledError
from orca_core.types import (
    FinishReason,
    GenerationChunk,
    Load,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)


class Desk:
    """An outlet with all its strings in the test's hand."""

    def __init__(self) -> None:
        self.load = Load(n_slots=100)
        self.well = True
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.now = 7.0
        self.outbox = Outbox()
        self.channels: dict[str, Channel] = {}
        self.outlet = Outlet(lambda: (self.load, self.well), self.cancelled.append, self.ended.append, lambda: self.now)

    def add(self, *names: str) -> list[int]:
        numbers = []
        for name in names:
            self.channels[name] = Channel(name, self.cancelled.append)
            numbers.append(self.outlet.add(name, self.channels[name]))
        return numbers

    def say(self, **texts: str) -> None:
        """One iteration's words."""
        for name, text in texts.items():
            finish = FinishReason.STOP if text.endswith(".") else None
            self.outbox.put(self.channels[name], GenerationChunk(name, text, (len(text),), finish_reason=finish))
        self.outbox.flush()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def said(parcel: Parcel) -> dict[str, object]:
    found = {}
    for word in parcel.words:
        what = unpack(word)
        found[word[0]] = what.text if isinstance(what, GenerationChunk) else what
    return found


async def next_parcel(parcels: AsyncGenerator[Parcel, None]) -> Parcel:
    return await asyncio.wait_for(anext(parcels), 10)


def test_words_are_small_and_lose_nothing() -> None:
    logprobs = (PositionLogprobs(TokenLogprob(3, -0.5, "c", b"c")),)
    plain = GenerationChunk("r", "ab", (1, 2))
    rich = GenerationChunk("r", "c", (3,), logprobs)
    last = GenerationChunk("r", "d", (4,), (), FinishReason.STOP, "4", Usage(2, 4), Timings(0.1, 0.2, 0.3))
    for chunk in (plain, rich, last):
        assert unpack(pickle.loads(pickle.dumps(pack(chunk)))) == chunk
        assert unpack(pack(chunk), "mine") == chunk._replace(request_id="mine")
    assert len(pickle.dumps(pack(plain))) < 40
    error = RequestCancelledError("r")
    assert unpack(("r", error), "mine") is error


async def test_an_iteration_is_one_parcel_for_all(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    assert (await next_parcel(parcels)).words == ()  # says at once how the replica stands
    assert desk.add("a", "b", "c") == [1, 2, 3]
    desk.say(a="x", b="y", c="z")
    parcel = await next_parcel(parcels)
    assert said(parcel) == {"a": "x", "b": "y", "c": "z"}
    assert parcel.standing == (desk.load, 7.0, 3, True)
    await parcels.aclose()


async def test_a_reader_that_lags_gets_the_words_of_a_request_in_one(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a", "b")
    for text in "xyz":
        desk.say(a=text)
    desk.say(b="w")
    await asyncio.sleep(0)
    assert said(await next_parcel(parcels)) == {"a": "xyz", "b": "w"}
    await parcels.aclose()


async def test_an_end_is_passed_on_once_and_frees_the_request(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a", "b")
    desk.say(a="x.", b="y")
    assert said(await next_parcel(parcels)) == {"a": "x.", "b": "y"}
    assert desk.ended == ["a"]
    assert len(desk.outlet) == 1
    await parcels.aclose()


async def test_an_error_is_a_word_too_behind_what_was_said_before(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a")
    desk.say(a="x")
    desk.outbox.fail(desk.channels["a"], DeadlineExceededError(2.0))
    desk.outbox.flush()
    (chunk,) = [unpack(word) for word in (await next_parcel(parcels)).words]
    (error,) = [unpack(word) for word in (await next_parcel(parcels)).words]
    assert isinstance(chunk, GenerationChunk)
    assert isinstance(error, DeadlineExceededError)
    assert desk.ended == ["a"]
    await parcels.aclose()


async def test_leaving_ends_everything(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a", "b")
    await parcels.aclose()
    assert desk.outlet.closed
    assert desk.cancelled == ["a", "b"]
    assert desk.ended == ["a", "b"]


async def test_closing_ends_the_stream(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a")
    desk.outlet.close()
    with pytest.raises(StopAsyncIteration):
        await next_parcel(parcels)
    assert desk.cancelled == ["a"]


async def test_what_is_dropped_says_nothing_more_but_tells_that_its_slots_are_free(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a", "b")
    desk.say(a="x")
    desk.outlet.drop(["a", "not-here-yet"])
    assert desk.cancelled == ["a"]
    assert said(await next_parcel(parcels)) == {}
    assert desk.ended == []  # the engine still has it
    desk.load = Load(n_slots=99)
    desk.outbox.fail(desk.channels["a"], RequestCancelledError("a"))
    desk.outbox.flush()
    parcel = await next_parcel(parcels)
    assert (parcel.words, parcel.standing.load) == ((), desk.load)
    assert desk.ended == ["a"]
    assert desk.outlet.is_dropped("not-here-yet")
    await parcels.aclose()


async def test_a_number_is_remembered_beyond_the_end(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.add("a")
    desk.say(a="x.")
    await next_parcel(parcels)
    assert desk.outlet.number_of("a") == 1
    assert desk.outlet.number_of("b") is None
    await parcels.aclose()


async def test_it_can_be_told_to_say_how_the_replica_stands(desk: Desk) -> None:
    parcels = desk.outlet.parcels()
    await next_parcel(parcels)
    desk.well = False
    desk.now = 9.0
    desk.outlet.tell()
    assert (await next_parcel(parcels)).standing == (desk.load, 9.0, 0, False)
    await parcels.aclose()
