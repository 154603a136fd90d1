"""The ingress over a service that has scaled to zero: whether it is ready, and what it knows of the model."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.waker import UNKNOWN_START_S
from orca_core.errors import UnavailableError
from tests.deployment.far_replicas import FarReplica, FarReplicas
from tests.deployment.ingress_rig import of_tokens, read, streams_of
from tests.deployment.plane import Clock, replicas_of, settle
from tests.deployment.serving_fakes import ByteTokenizer


@pytest.mark.parametrize("mode", ["wait", "refuse"])
async def test_an_ingress_over_a_service_at_zero(mode: str) -> None:
    """It knows the model from before, and is ready where requests may wait."""
    config = AppConfig.parse({"replicas": {"min": 0, "max": 2, "cold_requests": mode}})
    far, clock = replicas_of("a", n_slots=40), Clock()
    ingress = Ingress(config, far, ByteTokenizer(), clock)
    try:
        assert await ingress.ready()
        far.names.clear()
        for _ in range(12):
            clock.now += 1.0
            assert await ingress.ready() is (mode == "wait")
        assert (await ingress.model()).n_slots == 40
        assert (await ingress.status()).replicas == ()
        (task,) = await streams_of(ingress, of_tokens(2))
        assert far.n_waiting == 1
        if mode == "refuse":
            with pytest.raises(UnavailableError, match="no replica"):
                await task
            return
        far.add(FarReplica("b", 40))
        await ingress.status()
        await settle()
        far.all["b"].engine.step()
        far.all["b"].engine.step()
        await settle()
        assert (await task)[-1].replica == "b"
    finally:
        ingress.close()
        far.close()
        await settle()


async def test_an_ingress_that_does_not_know_the_model_yet_has_a_replica_started() -> None:
    """It was restarted while the service was at zero: it cannot tell what a request needs."""
    far = FarReplicas()
    ingress = Ingress(AppConfig.parse({"replicas": {"min": 0}}), far, ByteTokenizer(), Clock())
    assert not await ingress.ready()
    status = await ingress.status()
    assert (status.model.model_id, status.model.n_slots, status.replicas) == (ingress._config.model.id, 0, ())
    await settle()
    assert far.n_firsts == 0, "who only looks has nothing started"
    with pytest.raises(UnavailableError, match="no replica") as caught:
        await read(ingress, of_tokens())
    assert caught.value.retry_after_s == UNKNOWN_START_S
    await settle()
    assert far.n_waiting == 1
    ingress.close()
    with suppress(asyncio.CancelledError):
        await settle()
    assert far.n_waiting == 0


async def test_an_ingress_that_nobody_asked_knows_the_model_from_its_own_polls() -> None:
    """Started at one, scaled to zero before anybody came: the first request waits all the same."""
    clock = Clock()
    far = replicas_of("a", n_slots=40)
    config = AppConfig.parse({"replicas": {"min": 0, "max": 2, "cold_requests": "wait"}})
    ingress = Ingress(config, far, ByteTokenizer(), clock)
    try:
        await ingress._dispatcher.poll()  # what it does by itself
        far.names.clear()
        for _ in range(12):
            await ingress._dispatcher.poll()
        assert await ingress.ready()
        (task,) = await streams_of(ingress, of_tokens())
        assert not task.done()
        assert (await ingress.status()).waiting_requests == 1
        far.add(FarReplica("b", 40))
        await ingress._dispatcher.poll()
        await settle()
        while not task.done():
            far.all["b"].engine.step()
            await settle()
        assert (await task)[-1].chunk.finish_reason is not None
    finally:
        ingress.close()
        far.close()
