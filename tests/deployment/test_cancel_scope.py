"""Who can cancel what: a client's id is its own under its own key, and is remembered wherever its request ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployment.auth import ApiKeys
from deployment.client_ids import LONGEST, N_REMEMBERED, handle_of
from deployment.ingress import Ingress
from deployment.overview import Around
from deployment.quota import CALLER
from orca_core.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, RequestCancelledError
from orca_core.types import CancelOutcome
from tests.deployment.ingress_rig import CONFIG, Clock, FakePeers, a_call, of_tokens, read, streams_of
from tests.deployment.serving_fakes import ByteTokenizer, FakeReplicas


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
async def ingress(replicas: FakeReplicas) -> AsyncIterator[Ingress]:
    made = Ingress(CONFIG, replicas, ByteTokenizer(), Clock())
    yield made
    made.close()


async def test_a_key_cancels_nothing_of_another_key(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1  # they run until they are cancelled
    CALLER.set("one")
    (task,) = await streams_of(ingress, of_tokens(client_request_id="1"))
    CALLER.set("other")
    assert await ingress.cancel("1") is CancelOutcome.NOT_FOUND
    (theirs,) = await streams_of(ingress, of_tokens(client_request_id="1"))
    assert await ingress.cancel("1") is CancelOutcome.CANCELLED
    with pytest.raises(RequestCancelledError):
        await theirs
    assert not task.done()
    CALLER.set("one")
    assert await ingress.cancel("1") is CancelOutcome.CANCELLED
    with pytest.raises(RequestCancelledError):
        await task
    asked = set(replicas.cancels)
    assert len(asked) == 2  # nor on a replica, or in another ingress, which know no caller
    assert "1" not in asked
    assert set(replicas.handles) == asked


async def test_other_ingresses_are_told_whose_id_it_is(replicas: FakeReplicas) -> None:
    peers = FakePeers()
    one = Ingress(CONFIG, replicas, ByteTokenizer(), Clock())
    asked: list[str] = []

    async def cancel(handle: str) -> CancelOutcome:
        asked.append(handle)
        return await one.cancel_here(handle)

    peers.cancel = cancel  # type: ignore[method-assign]
    other = Ingress(CONFIG, replicas, ByteTokenizer(), Clock(), around=Around(peers))
    replicas.n_free = 1
    CALLER.set("one")
    (task,) = await streams_of(one, of_tokens(client_request_id="1"))
    CALLER.set("other")
    assert await other.cancel("1") is CancelOutcome.NOT_FOUND
    CALLER.set("one")
    assert await other.cancel("1") is CancelOutcome.CANCELLED
    with pytest.raises(RequestCancelledError):
        await task
    assert len(set(asked)) == 2
    one.close()
    other.close()


def test_every_process_gives_a_key_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret-key-number-one\nsecret-key-number-two\n")
    here, there = ApiKeys(path), ApiKeys(path)
    one, other = (f"Bearer secret-key-number-{number}" for number in ("one", "two"))
    assert here.check([one]) == there.check([one]) != here.check([other])
    assert "secret" not in here.check([one])
    assert len(here.check([one])) == 32


async def test_an_id_that_ended_is_remembered_where_no_replica_knows_it(
    ingress: Ingress, replicas: FakeReplicas
) -> None:
    replicas.n_free = 1
    waiting = await streams_of(ingress, of_tokens(client_request_id="mine"))
    assert await ingress.cancel("mine") is CancelOutcome.CANCELLED
    await asyncio.wait(waiting)
    assert await ingress.cancel("mine") is CancelOutcome.ALREADY_FINISHED
    assert await ingress.cancel_here("mine") is CancelOutcome.ALREADY_FINISHED
    assert await ingress.cancel("unheard-of") is CancelOutcome.NOT_FOUND


async def test_so_is_one_that_was_refused_and_one_that_expired(ingress: Ingress, replicas: FakeReplicas) -> None:
    with pytest.raises(DeadlineExceededError):
        await read(ingress, a_call(client_request_id="late", timeout_s=-1.0))
    assert await ingress.cancel("late") is CancelOutcome.ALREADY_FINISHED


async def test_only_so_many_are_remembered(ingress: Ingress) -> None:
    for number in range(N_REMEMBERED + 1):
        with pytest.raises((DeadlineExceededError, OverloadedError)):
            await read(ingress, of_tokens(client_request_id=f"n{number}", timeout_s=-1.0))
    assert await ingress.cancel("n0") is CancelOutcome.NOT_FOUND
    assert await ingress.cancel("n1") is CancelOutcome.ALREADY_FINISHED


async def test_nothing_of_an_id_that_was_refused_for_its_length_is_kept(ingress: Ingress) -> None:
    for number in range(3):
        with pytest.raises(InvalidRequestError, match="at most 256 characters"):
            await read(ingress, a_call(client_request_id=f"{number}" * 100_000))
    assert max(map(len, ingress._live._ids._ended)) <= LONGEST
    assert len(handle_of("a" * 100_000)) <= LONGEST
    assert handle_of("a" * 100_000) != handle_of("b" * 100_000)
    assert handle_of("a" * 256) == "a" * 256
