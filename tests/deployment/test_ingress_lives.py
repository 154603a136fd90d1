"""The ingress over replicas with a life of their own: deaths, drains, deadlines in line."""

from __future__ import annotations

import asyncio

import pytest

from deployment.ingress import Ingress
from deployment.served_ingress import ServedIngress
from orca_core.errors import (
    DeadlineExceededError,
    UnavailableError,
)
from orca_core.types import FinishReason
from tests.deployment.ingress_rig import CONFIG, Clock, counters, of_tokens, read, streams_of
from tests.deployment.plane import replicas_of, settle
from tests.deployment.serving_fakes import ByteTokenizer
from tests.deployment.stepping import answer_of


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_a_stream_whose_replica_dies_says_so_on_its_last_message(clock: Clock) -> None:
    far = replicas_of("a", "b")
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock)
    try:
        await ingress.model()
        (task,) = await streams_of(ingress, of_tokens())
        home = next(name for name in "ab" if far.all[name].engine.running)
        request = far.all[home].engine.seen[0]
        far.all[home].engine.step()
        await settle()
        far.all[home].kill()
        other = far.all["b" if home == "a" else "a"].engine
        while not task.done():
            other.step()
            await settle()
        served = await task
        assert [token_id for each in served for token_id in each.chunk.token_ids] == answer_of(request)
        assert served[-1].resumes == 1
        assert served[-1].replica != home
        assert (await counters(ingress))["resumes"] == 1
    finally:
        ingress.close()
        far.close()


async def test_status_knows_the_line_and_a_drain_lets_it_run_out(clock: Clock) -> None:
    far = replicas_of("a", n_slots=20)
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock)
    try:
        await ingress.model()
        tasks = await streams_of(ingress, *[of_tokens()] * 3)
        status = await ingress.status()
        assert (status.waiting_requests, status.waiting_slots) == (2, 28)
        assert await ingress.drain() == 3
        while not all(task.done() for task in tasks):
            far.all["a"].engine.step()
            await settle()
        assert [(await task)[-1].chunk.finish_reason for task in tasks] == [FinishReason.LENGTH] * 3
        status = await ingress.status()
        assert (status.waiting_requests, status.waiting_slots) == (0, 0)
    finally:
        ingress.close()
        far.close()


async def test_a_drained_ingress_lets_the_replicas_go(clock: Clock) -> None:
    """An open link is a call in progress, and Serve ends no replica that has one."""
    far = replicas_of("a", "b")
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock)
    try:
        await ingress.model()
        (task,) = await streams_of(ingress, of_tokens())
        assert await ingress.drain() == 1
        await settle()
        assert all(each.replica._attached for each in far.all.values())
        while not task.done():
            for each in far.all.values():
                each.engine.step()
            await settle()
        assert (await task)[-1].chunk.finish_reason is FinishReason.LENGTH
        assert await ingress.drain() == 0
        await settle()
        assert not any(each.replica._attached for each in far.all.values())
        assert len((await ingress.status()).replicas) == 2
        assert await ingress.drain() == 0
        await settle()
        assert not any(each.replica._attached for each in far.all.values())
    finally:
        ingress.close()
        far.close()


async def test_the_end_of_a_drain_lets_the_replicas_go(clock: Clock) -> None:
    far = replicas_of("a")
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock)
    try:
        await ingress.model()
        (task,) = await streams_of(ingress, of_tokens())
        await ingress.drain()
        await ingress.end_open()
        await settle()
        with pytest.raises(UnavailableError, match="shut down"):
            await task
        assert not far.all["a"].replica._attached
        assert not far.all["a"].engine.running
    finally:
        ingress.close()
        far.close()


async def test_an_ingress_that_serve_ends_lets_the_replicas_go(clock: Clock) -> None:
    """Without a drain of ours: `serve shutdown`, fewer ingresses, a new version."""
    far = replicas_of("a")
    ingress = ServedIngress.__new__(ServedIngress)
    Ingress.__init__(ingress, CONFIG, far, ByteTokenizer(), clock)
    await ingress.model()
    await settle()
    assert far.all["a"].replica._attached
    ingress.__del__()  # Serve calls it by name
    await settle()
    assert not far.all["a"].replica._attached
    ServedIngress.__new__(ServedIngress).__del__()  # its constructor had failed
    far.close()


async def test_a_deadline_passes_in_line(clock: Clock) -> None:
    far = replicas_of("a", n_slots=20)
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock)
    try:
        await ingress.model()
        (first,) = await streams_of(ingress, of_tokens())
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0\.02 s"):
            await read(ingress, of_tokens(timeout_s=0.02))
        assert ingress._dispatcher.waiting_requests == 0
        assert len(far.all["a"].engine.seen) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    finally:
        ingress.close()
        far.close()
