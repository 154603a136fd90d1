"""What the ingress hears of replicas of which one hangs or is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployment import replica_set
from deployment.replica import ReplicaReport
from deployment.replica_set import ServeReplicaSet
from orca_core.types import CancelOutcome, Load
from tests.deployment.serving_fakes import INFO


class Result:
    """One replica's answer: a value, an error, or nothing for ever."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.cancelled = False

    async def get_async(self) -> object:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Enough of a Serve handle. ``results``: ``None`` = the replicas are not even reached."""

    def __init__(self, results: list[Result] | None) -> None:
        self.results = results

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str, *_: object) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        if self.results is None:
            await asyncio.Event().wait()
        return self.results or []


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "BROADCAST_TIMEOUT_S", 0.01)


def report(name: str) -> ReplicaReport:
    return ReplicaReport(name, INFO, Load(n_slots=128), 1.0)


async def test_a_replica_that_hangs_hides_no_other() -> None:
    hung, lost = Result(None), Result(RuntimeError("gone"))
    replicas = ServeReplicaSet(Handle([Result(report("a")), hung, lost, Result(report("b"))]))
    assert [each.replica for each in await replicas.reports()] == ["a", "b"]
    assert hung.cancelled


async def test_a_cancel_reaches_who_can_be_reached() -> None:
    answers: list[Result] = [Result(None), Result(CancelOutcome.NOT_FOUND), Result(CancelOutcome.CANCELLED)]
    assert await ServeReplicaSet(Handle(answers)).cancel("mine") is CancelOutcome.CANCELLED


async def test_nobody_there() -> None:
    assert await ServeReplicaSet(Handle(None)).reports() == []
    assert await ServeReplicaSet(Handle([])).cancel("mine") is CancelOutcome.NOT_FOUND
