"""The request router in Serve's clothes: a call goes where its caller says, or nowhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from deployment.parcels import Pinned
from deployment.router import N_DEPARTED, PinnedRouter
from orca_core.errors import UnavailableError

DEPLOYMENT = DeploymentID("Replica", "orca")


def a_replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=10)


def pending(*args: object) -> Any:
    return SimpleNamespace(args=list(args), metadata=SimpleNamespace(internal_request_id="r"))


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> PinnedRouter:
    async def no_probe(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(PinnedRouter, "_probe_queue_lens", no_probe)
    return PinnedRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, initial_backoff_s=0.0, max_backoff_s=0.0)


async def choose(router: PinnedRouter, *args: object, is_retry: bool = False) -> str:
    replica = await router._choose_replica_for_request(pending(*args), is_retry=is_retry)
    return str(replica.replica_id.unique_id)


async def test_a_pinned_call_goes_to_its_replica(router: PinnedRouter) -> None:
    router.update_replicas([a_replica("a"), a_replica("b")])
    assert [await choose(router, Pinned(name), "x") for name in "abab"] == ["a", "b", "a", "b"]


async def test_a_pinned_call_fails_at_once_where_its_replica_is_not(router: PinnedRouter) -> None:
    with pytest.raises(UnavailableError):
        await choose(router, Pinned("a"))  # nor does it wait for the first replica
    router.update_replicas([a_replica("b")])
    with pytest.raises(UnavailableError):
        await choose(router, Pinned("a"))


async def test_a_pinned_call_that_was_refused_goes_nowhere_else(router: PinnedRouter) -> None:
    router.update_replicas([a_replica("a"), a_replica("b")])
    with pytest.raises(UnavailableError):
        await choose(router, Pinned("a"), is_retry=True)


async def test_a_replica_that_left_can_still_be_told_to_forget(router: PinnedRouter) -> None:
    """It may be draining."""
    router.update_replicas([a_replica("a"), a_replica("b")])
    router.update_replicas([a_replica("b")])
    assert await choose(router, Pinned("a", may_have_left=True)) == "a"
    with pytest.raises(UnavailableError):
        await choose(router, Pinned("a"))
    router.update_replicas([])
    for number in range(N_DEPARTED + 1):
        router.update_replicas([a_replica(f"n{number}")])
    with pytest.raises(UnavailableError):
        await choose(router, Pinned("a", may_have_left=True))


async def test_any_other_call_goes_to_any_replica_and_waits_for_the_first(router: PinnedRouter) -> None:
    waiting = asyncio.create_task(choose(router, "x"))
    await asyncio.sleep(0)
    assert not waiting.done()
    router.update_replicas([a_replica("a"), a_replica("b")])
    assert await waiting in "ab"
    assert {await choose(router, is_retry=bool(i % 2)) for i in range(60)} == {"a", "b"}
