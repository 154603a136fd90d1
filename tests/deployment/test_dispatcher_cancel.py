"""The serving plane in virtual time: requests that are cancelled, readers that stall."""

from __future__ import annotations

import asyncio

import pytest

from orca_core.errors import (
    RequestCancelledError,
)
from tests.deployment.plane import settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready, where
from tests.deployment.stepping import answer_of

__all__ = ["make"]


async def test_a_cancel_frees_the_slots_and_the_next_one_runs(make: Make) -> None:
    plane = await ready(make, "a", n_slots=20)
    first, second = plane.ask(4, 16), plane.ask(4, 16)
    await plane.step(3)
    first.stream.cancel()
    await settle()
    assert where(plane) == {"a": 1}
    await plane.run_out()
    assert isinstance(first.error, RequestCancelledError)
    assert_undisturbed(second)
    plane.assert_idle()


async def test_many_cancels_of_one_instant_are_one_call(make: Make) -> None:
    plane = await ready(make, "a", n_slots=1000)
    clients = [plane.ask() for _ in range(10)]
    await settle()
    for client in clients:
        client.stream.cancel()
    await settle()
    assert plane.replicas.drops == [tuple(f"r{n}.1" for n in range(1, 11))]
    plane.assert_idle()


@pytest.mark.parametrize("slow", ["submit_waits", "answer_waits"])
async def test_a_cancel_while_the_request_is_on_its_way(make: Make, slow: str) -> None:
    """Field case A2: the drop overtakes the request, or its acceptance meets nobody."""
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    gate = asyncio.Event()
    setattr(far, slow, gate)
    client = plane.ask()
    await settle()
    client.stream.cancel()
    await settle()
    gate.set()
    await plane.step()
    assert isinstance(client.error, RequestCancelledError)
    plane.assert_idle()


async def test_a_drop_that_overtakes_its_request_keeps_it_from_beginning(make: Make) -> None:
    plane = await ready(make, "a")
    far = plane.replicas.all["a"]
    link = next(iter(plane.dispatcher._links))
    plane.replicas.drop("a", link.link_id, ("r9.1",))
    await settle()
    request = plane.stream()._request
    from dataclasses import replace

    answer = await plane.replicas.submit("a", link.link_id, replace(request, request_id="r9.1"), "mine")
    assert type(answer).__name__ == "Rejected"
    assert not far.engine.seen


async def test_cancels_at_every_moment_leave_nothing(make: Make) -> None:
    """Field cases A1, A2, A14: a cancel in line, on the way, before the first word, between words, at the end."""
    plane = await ready(make, "a", "b", n_slots=40)
    for moment in range(60):
        client, other = plane.ask(4, 6), plane.ask(4, 6)
        for turn in range(moment):
            await asyncio.sleep(0)
            if turn % 7 == 6:
                for far in plane.replicas.all.values():
                    far.engine.step()
        client.stream.cancel()
        await plane.run_out()
        assert_undisturbed(other)
        assert client.finished != isinstance(client.error, RequestCancelledError)
        plane.clients.clear()
        plane.assert_idle()


async def test_a_reader_that_stalls_is_cancelled_and_hurts_nobody(make: Make) -> None:
    """Field case B20."""
    plane = await ready(make, "a", n_slots=1000, max_backlog=5)
    stalled, other = plane.ask(4, 30), plane.ask(4, 30)
    stalled.reads.clear()
    await plane.step(8)
    assert where(plane) == {"a": 1}
    stalled.reads.set()
    await plane.run_out()
    assert isinstance(stalled.error, RequestCancelledError)
    assert stalled.tokens == answer_of(stalled.stream._request)[: len(stalled.tokens)]
    assert_undisturbed(other)
    plane.assert_idle()
