"""Where an ingress is short of CPU, replicas put several iterations into a parcel; first words and ends never wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from deployment.outlet import LONGEST_PACE_S
from deployment.parcels import Parcel
from tests.deployment.test_outlet import Desk, next_parcel, said

PACE_S = 1.0  # so long that nothing here is late by itself


class Paced:
    """A desk whose outlet has said its first parcel and both requests' first words, and is told to take its time."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.parcels: AsyncGenerator[Parcel, None] = self.desk.outlet.parcels()
        self.next: asyncio.Task[Parcel] | None = None

    async def begin(self) -> None:
        await next_parcel(self.parcels)
        self.desk.add("a", "b")
        self.desk.say(a="x", b="y")
        await next_parcel(self.parcels)
        self.desk.outlet.pace(PACE_S)
        self.ask()

    def ask(self) -> None:
        self.next = asyncio.get_running_loop().create_task(next_parcel(self.parcels))

    async def comes(self) -> dict[str, object]:
        assert self.next is not None
        found = said(await self.next)
        self.ask()
        return found

    async def waits(self) -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.next is not None
        return not self.next.done()


@pytest.fixture
async def paced() -> AsyncIterator[Paced]:
    made = Paced()
    await made.begin()
    yield made
    assert made.next is not None
    made.next.cancel()
    await asyncio.wait([made.next])
    await made.parcels.aclose()


async def test_iterations_share_a_parcel(paced: Paced) -> None:
    for text in "123":
        paced.desk.say(a=text, b=text)
        assert await paced.waits()
    began = asyncio.get_running_loop().time()
    assert await paced.comes() == {"a": "123", "b": "123"}
    assert asyncio.get_running_loop().time() - began <= 10 * PACE_S  # by itself, without another word


async def test_words_that_are_further_apart_than_the_pace_leave_at_once(paced: Paced) -> None:
    paced.desk.outlet.pace(0.01)
    for text in "12":
        await asyncio.sleep(0.02)
        paced.desk.say(a=text)
        assert not await paced.waits()
        assert await paced.comes() == {"a": text}


@pytest.mark.parametrize("text", ["z", "z."])
async def test_the_first_word_of_a_request_does_not_wait_and_takes_the_others_along(paced: Paced, text: str) -> None:
    paced.desk.say(a="1")
    assert await paced.waits()
    paced.desk.add("c")
    paced.desk.say(a="2", c=text)
    assert not await paced.waits()
    assert await paced.comes() == {"a": "12", "c": text}


async def test_an_end_does_not_wait(paced: Paced) -> None:
    paced.desk.say(a="1", b="1")
    assert await paced.waits()
    paced.desk.say(a="2.")
    assert not await paced.waits()
    assert await paced.comes() == {"a": "12.", "b": "1"}


async def test_an_error_does_not_wait(paced: Paced) -> None:
    from orca_core.errors import DeadlineExceededError

    paced.desk.say(b="1")
    error = DeadlineExceededError(1.0)
    paced.desk.outbox.fail(paced.desk.channels["a"], error)
    paced.desk.outbox.flush()
    assert not await paced.waits()
    assert await paced.comes() == {"b": "1", "a": error}


async def test_what_is_told_does_not_wait(paced: Paced) -> None:
    paced.desk.say(a="1")
    assert await paced.waits()
    paced.desk.outlet.tell()
    assert not await paced.waits()
    assert await paced.comes() == {"a": "1"}


async def test_without_a_pace_every_iteration_is_a_parcel_again_and_what_waited_leaves_at_once(paced: Paced) -> None:
    paced.desk.say(a="1")
    assert await paced.waits()
    paced.desk.outlet.pace(0.0)
    assert not await paced.waits()
    assert await paced.comes() == {"a": "1"}
    paced.desk.say(a="2")
    assert not await paced.waits()
    assert await paced.comes() == {"a": "2"}


async def test_a_pace_from_elsewhere_is_bounded(paced: Paced) -> None:
    assert LONGEST_PACE_S <= 1.0
    paced.desk.outlet.pace(1e9)
    paced.desk.say(a="1")
    assert await paced.waits()
    assert await paced.comes() == {"a": "1"}


async def test_an_outlet_that_is_closed_waits_for_nothing(paced: Paced) -> None:
    paced.desk.say(a="1")
    assert await paced.waits()
    paced.desk.outlet.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert paced.next is not None
    assert paced.next.done()
    assert isinstance(paced.next.exception(), StopAsyncIteration | RuntimeError)
