"""The ingress over fake replicas: streams from end to end, losses, cancels, drains, and what it knows."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployment.ingress import Ingress
from deployment.overview import Around
from orca_core.errors import InternalError, RequestCancelledError, UnavailableError
from orca_core.types import CancelOutcome, FinishReason
from tests.deployment.ingress_rig import (
    CONFIG,
    Clock,
    FakePeers,
    a_call,
    clock,
    counters,
    ingress,
    last_chance,
    read,
    replicas,
)
from tests.deployment.serving_fakes import INFO, ByteTokenizer, FakeReplicas

__all__ = ["clock", "ingress", "last_chance", "replicas"]


async def test_a_stream_from_end_to_end(ingress: Ingress, replicas: FakeReplicas) -> None:
    stream = await read(ingress, a_call(client_request_id="mine"))
    assert "".join(served.chunk.text for served in stream) == "t0 t1 t2 "
    assert {served.request_id for served in stream} == {"mine"}
    assert [served.chunk.finish_reason for served in stream] == [None, None, FinishReason.LENGTH]
    assert stream[-1].replica == "replica-1"
    request = replicas.streams[0].request
    assert request.token_ids == tuple(b"hello")
    assert request.max_new_tokens == 3
    assert await counters(ingress) == {
        "requests": 1, "requests_length": 1, "prompt_tokens": 5, "generated_tokens": 3,
    }  # fmt: skip


async def test_our_id_is_never_the_clients(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call(client_request_id="mine"))
    await read(ingress, a_call(client_request_id="mine"))
    ids = {stream.request.request_id for stream in replicas.streams}
    assert len(ids) == 2
    assert not any("mine" in request_id for request_id in ids)


async def test_without_a_clients_id_ours_is_echoed(ingress: Ingress, replicas: FakeReplicas) -> None:
    stream = await read(ingress, a_call())
    assert f"{stream[0].request_id}.1" == replicas.streams[0].request.request_id


async def test_a_reader_that_leaves_cancels(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)
    assert replicas.streams[0].n_cancels == 1
    assert replicas.dropped == [replicas.streams[0].request.request_id]
    assert (await counters(ingress))["requests_cancelled"] == 1


async def test_a_cancelled_task_cancels(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 0
    task = asyncio.create_task(read(ingress, a_call()))
    await replicas.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert replicas.streams[0].n_cancels == 1
    assert (await counters(ingress))["requests_cancelled"] == 1


async def test_a_finished_stream_is_not_cancelled(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call())
    assert replicas.streams[0].n_cancels == 0
    assert not replicas.dropped


async def test_draining_refuses_what_comes_and_finishes_what_is_open(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    assert await ingress.drain() == 1
    for refused in (read(ingress, a_call()), ingress.check([a_call()])):
        with pytest.raises(UnavailableError, match="draining"):
            await refused
    assert not await ingress.ready()
    assert (await ingress.status()).draining
    replicas.streams[0].ended.set()
    assert [served.chunk.finish_reason async for served in stream] == [None, FinishReason.LENGTH]
    assert await ingress.drain() == 0


async def test_what_is_open_when_the_drain_ends_is_lost_and_says_so(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    await ingress.drain()
    await ingress.end_open()
    with pytest.raises(UnavailableError, match="shut down"):
        await anext(stream)
    assert await ingress.drain() == 0


async def test_a_lost_stream_is_never_a_normal_end(last_chance: Ingress, replicas: FakeReplicas) -> None:
    """Field case B10."""
    replicas.cut_after = 2
    with pytest.raises(UnavailableError):
        await read(last_chance, a_call())
    assert (await counters(last_chance))["requests_error"] == 1


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError"])
async def test_a_dead_replica_is_unavailable(last_chance: Ingress, replicas: FakeReplicas, name: str) -> None:
    import ray.exceptions

    kind = getattr(ray.exceptions, name)
    replicas.cut_after = 1
    replicas.error = kind() if name == "ActorDiedError" else kind("no answer", b"x" * 16)
    with pytest.raises(UnavailableError):
        await read(last_chance, a_call())


async def test_an_unknown_error_says_nothing_but_the_id(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.submit_error = InternalError("r.1")
    replicas.submit_error.__cause__ = ValueError("the secret prompt")
    with pytest.raises(InternalError) as caught:
        await read(ingress, a_call(client_request_id="mine"))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_cancel_by_the_clients_id(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    streams = [ingress.generate(a_call(client_request_id="mine")) for _ in range(2)]
    other = ingress.generate(a_call(client_request_id="other"))
    for stream in (*streams, other):
        await anext(stream)
    assert await ingress.cancel("mine") is CancelOutcome.CANCELLED
    for stream in streams:
        with pytest.raises(RequestCancelledError, match="mine"):
            await anext(stream)
    assert replicas.cancels == ["mine"]
    assert replicas.streams[2].n_cancels == 0
    await other.aclose()


@pytest.mark.parametrize("outcome", list(CancelOutcome))
async def test_cancel_asks_the_replicas_for_what_another_ingress_started(
    ingress: Ingress, replicas: FakeReplicas, outcome: CancelOutcome
) -> None:
    replicas.outcome = outcome
    assert await ingress.cancel("elsewhere") is outcome


async def test_cancel_asks_the_other_ingresses_for_what_waits_in_their_line(replicas: FakeReplicas) -> None:
    peers = FakePeers()
    ingress = Ingress(CONFIG, replicas, ByteTokenizer(), around=Around(peers))
    assert await ingress.cancel("elsewhere") is CancelOutcome.CANCELLED
    assert peers.asked == ["elsewhere"]
    assert await ingress.cancel_here("elsewhere") is CancelOutcome.NOT_FOUND
    ingress.close()


async def test_the_model_has_the_public_name_and_the_largest_pool(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.infos = [INFO, replace(INFO, n_slots=256)]
    model = await ingress.model()
    assert (model.model_id, model.n_slots) == ("our-name", 256)


async def test_no_replica_is_unavailable_until_there_is_one(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.infos = []
    assert not await ingress.ready()
    with pytest.raises(UnavailableError):
        await read(ingress, a_call())
    status = await ingress.status()
    assert (status.model.model_id, status.model.n_slots, status.replicas) == ("our-name", 0, ())
    replicas.infos = [INFO]
    assert len(await read(ingress, a_call())) == 3


async def test_readiness_does_not_ask_at_every_probe(ingress: Ingress, replicas: FakeReplicas, clock: Clock) -> None:
    assert [await ingress.ready() for _ in range(5)] == [True] * 5
    assert replicas.n_reports == 1
    replicas.infos = []
    clock.now += 10
    assert not await ingress.ready()
