"""What ``status`` says of replicas that do not answer, of other ingresses, and of the autoscaler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.overview import NOTHING_AROUND, Around
from deployment.peers import IngressShare
from deployment.scaling_board import Note, ScalingBoard
from orca_core.types import ModelInfo
from tests.deployment.far_replicas import FarReplicas
from tests.deployment.ingress_rig import FakePeers, of_tokens, streams_of
from tests.deployment.plane import Clock, replicas_of, settle
from tests.deployment.serving_fakes import INFO, ByteTokenizer

CONFIG = AppConfig.parse({"model": {"id": "our-name"}, "ingress": {"replicas": 3}})


@pytest.fixture
async def far() -> AsyncIterator[FarReplicas]:
    made = replicas_of("a", "b", n_slots=20)
    yield made
    made.close()


async def ingress_over(far: FarReplicas, clock: Clock, around: Around = NOTHING_AROUND) -> Ingress:
    ingress = Ingress(CONFIG, far, ByteTokenizer(), clock, around=around)
    assert isinstance(await ingress.model(), ModelInfo)
    await settle()
    return ingress


async def test_a_replica_that_misses_the_question_is_shown_as_it_was(far: FarReplicas) -> None:
    clock = Clock()
    ingress = await ingress_over(far, clock)
    tasks = await streams_of(ingress, of_tokens(), of_tokens())
    for each in far.all.values():
        each.engine.step()
    await settle()
    far.all["a"].freeze()
    clock.now += 3.0
    a, b = (await ingress.status()).replicas
    assert (a.replica, a.silent, a.load.reserved_slots, a.load.running, a.report_age_s) == ("a", True, 14, 1, 3.0)
    assert (b.replica, b.silent, b.load.reserved_slots) == ("b", False, 14)
    far.all["a"].thaw()
    assert [each.silent for each in (await ingress.status()).replicas] == [False, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ingress.close()


async def test_a_replica_that_was_lost_is_not_shown(far: FarReplicas) -> None:
    ingress = await ingress_over(far, Clock())
    far.all["a"].kill()
    await settle()
    assert [each.replica for each in (await ingress.status()).replicas] == ["b"]
    ingress.close()


async def test_lines_and_totals_are_summed_over_the_ingresses_that_answer(far: FarReplicas) -> None:
    shares = [
        IngressShare("x", 2, 30, counters={"requests": 7, "resumes": 1}),
        IngressShare("y", 1, 12, draining=True, counters={"requests": 5}),
    ]
    peers = FakePeers(*shares, n_known=4)
    ingress = peers.own = await ingress_over(far, Clock(), Around(peers))
    tasks = await streams_of(ingress, *[of_tokens()] * 3)
    status = await ingress.status()
    assert (status.waiting_requests, status.waiting_slots) == (2 + 1 + 1, 30 + 12 + 14)
    assert status.counters == {"requests": 12, "resumes": 1}
    assert (status.ingresses_answered, status.ingresses_known, status.draining) == (3, 4, True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await ingress.status()).counters == {"requests": 15, "resumes": 1, "requests_cancelled": 3}
    ingress.close()


async def test_ingresses_that_serve_does_not_name_are_missing_all_the_same(far: FarReplicas) -> None:
    peers = FakePeers(n_known=0)
    ingress = await ingress_over(far, Clock(), Around(peers))
    status = await ingress.status()
    assert (status.ingresses_answered, status.ingresses_known) == (1, CONFIG.ingress.replicas)
    ingress.close()


class Shelf:
    """A store in memory; ``fails``: it does not answer."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.fails = False

    def put(self, key: bytes, value: bytes) -> None:
        if self.fails:
            raise ConnectionError
        self.kept[key] = value

    def get(self, key: bytes) -> bytes | None:
        if self.fails:
            raise ConnectionError
        return self.kept.get(key)


async def test_status_says_why_there_are_as_many_replicas(far: FarReplicas) -> None:
    wall, shelf = Clock(1000.0), Shelf()
    board = ScalingBoard(shelf, "orca", wall)
    ingress = await ingress_over(far, Clock(), Around(scaling=board.read))
    assert (await ingress.status()).scaling is None
    board.write(Note(2, 1, "1 -> 2 replicas: much to do", 1000.0, "1 -> 2 replicas: much to do", 1000.0))
    wall.now += 2.0
    ScalingBoard(shelf, "another", wall).write(Note(9, 9, "of another application", 1002.0))
    board.write(Note(2, 2, "2 replicas: enough", 1002.0, "1 -> 2 replicas: much to do", 1000.0))
    wall.now += 0.5
    said = (await ingress.status()).scaling
    assert said is not None
    assert (said.target, said.actual, said.reason, said.age_s) == (2, 2, "2 replicas: enough", 0.5)
    assert (said.last_change, said.last_change_age_s) == ("1 -> 2 replicas: much to do", 2.5)
    ingress.close()


async def test_a_store_that_fails_stops_neither_decisions_nor_status(
    far: FarReplicas, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    board = ScalingBoard(shelf, "orca", Clock())
    ingress = await ingress_over(far, Clock(), Around(scaling=board.read))
    shelf.fails = True
    for _ in range(3):
        board.write(Note(1, 1, "as it is", 0.0))
    (said,) = caplog.messages
    assert said == "the scaling decision was not written down: ConnectionError"
    assert (await ingress.status()).scaling is None
    shelf.fails, shelf.kept = False, {b"scaling/orca": b"{}"}
    assert (await ingress.status()).scaling is None
    assert (await ingress.status()).model.n_slots == 20 < INFO.n_slots
    ingress.close()
