"""Metrics that are recorded later than what they tell of: no token and no device waits for a call into Ray."""

from __future__ import annotations

import asyncio

import pytest

from deployment import metrics as metrics_module
from deployment.metrics import MOST_UNRECORDED, Deferred, ReplicaMetrics, Spec
from deployment.parcels import Pinned
from deployment.replica import Replica
from orca_core.iterations import Iteration, IterationPart
from tests.deployment.fake_registry import FakeRegistry
from tests.deployment.plane import settle
from tests.deployment.stepping import SteppingEngine


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


# ---- an ingress


async def test_deferred_metrics_are_recorded_in_their_order_by_the_event_loop(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "RECORD_WITHIN_S", 0)
    record = Deferred(registry).make(Spec("gauge", "g", "", ("replica",)))
    for _ in range(2):
        record(1.0, replica="a")
        record(2.0, wrong="a")  # which the registry refuses
        record(3.0, replica="a")
        await asyncio.to_thread(record, 0.5, replica="thread")
        assert registry.of("g", replica="thread")[-1] == 0.5, "where no event loop runs, at once"
        await asyncio.sleep(0.01)
    assert registry.of("g", replica="a") == [1.0, 3.0, 1.0, 3.0]
    assert len(caplog.records) == 2


async def test_a_token_waits_for_no_metric(registry: FakeRegistry) -> None:
    record = Deferred(registry).make(Spec("counter", "c", ""))
    record(1.0)
    assert not registry.values


# ---- a replica

ITERATION = Iteration(10.0, 10.25, (IterationPart("a", 7, True), IterationPart("b", 1, False)))


def test_an_iteration_is_four_records(registry: FakeRegistry) -> None:
    recorded = ReplicaMetrics(registry, "r1")
    recorded.on_iteration(ITERATION)
    recorded.on_iteration(ITERATION)
    assert not registry.values, "a call into Ray while the device waits"
    recorded.iterations()
    recorded.iterations()
    assert registry.total("orca_iterations_total", replica="r1") == 2
    assert registry.of("orca_iteration_seconds") == [0.25, 0.25]
    assert registry.of("orca_iteration_requests") == [2, 2]
    assert registry.of("orca_iteration_tokens") == [8, 8]
    assert sum(len(values) for values in registry.values.values()) == 8


def test_broken_metrics_do_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def make(self, spec: Spec) -> metrics_module.Record:
            def record(value: float, **tags: str) -> None:
                raise RuntimeError("no agent")

            return record

    recorded = ReplicaMetrics(Broken(), "r1")
    for _ in range(3):
        recorded.on_iteration(ITERATION)
        recorded.iterations()
    assert len(caplog.records) == 1


async def test_iterations_are_recorded_as_their_words_leave(registry: FakeRegistry) -> None:
    recorded = ReplicaMetrics(registry, "r1")
    replica = Replica(SteppingEngine(), "r1", metrics=recorded)
    parcels = replica.attach(Pinned("r1"), "i", "link")
    await anext(parcels)
    recorded.on_iteration(ITERATION)
    next_parcel = asyncio.ensure_future(anext(parcels))
    await settle()
    assert registry.of("orca_iteration_tokens") == [8]
    recorded.on_iteration(ITERATION)
    await replica.report("i")  # where nobody is told anything, an ingress still asks
    assert registry.of("orca_iteration_tokens") == [8, 8]
    next_parcel.cancel()


def test_iterations_that_nobody_records_do_not_pile_up(registry: FakeRegistry) -> None:
    recorded = ReplicaMetrics(registry, "r1")
    for _ in range(MOST_UNRECORDED + 1):
        recorded.on_iteration(ITERATION)
    assert registry.total("orca_iterations_total", replica="r1") == MOST_UNRECORDED + 1
