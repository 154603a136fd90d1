"""The ingress and deadlines: what counts as one, what a replica is told of it, and who enforces it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployment import live as live_module
from deployment.choices import merged
from deployment.ingress import Ingress
from orca_core.errors import DeadlineExceededError
from tests.deployment.ingress_rig import CONFIG, Clock, a_call, clock, counters, ingress, read, replicas
from tests.deployment.serving_fakes import FakeReplicas

__all__ = ["clock", "ingress", "replicas"]


async def test_a_client_that_is_gone_at_its_deadline_counts_as_such(
    ingress: Ingress, replicas: FakeReplicas, clock: Clock
) -> None:
    replicas.n_free = 0
    task = asyncio.create_task(read(ingress, a_call(timeout_s=2.0)))
    await replicas.begun.wait()
    clock.now += 2.0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await counters(ingress))["requests_deadline"] == 1


@pytest.mark.parametrize(
    ("timeout_s", "after_s", "outcome"),
    [
        (2.0, 2.0, "deadline"),
        (2.0, 1.9, "deadline"),  # the client's clock has been running since it sent the request
        (2.0, 1.5, "cancelled"),
        (60.0, 59.8, "deadline"),
        (600.0, 599.0, "deadline"),  # gRPC has sent it as 601
        (60.0, 59.0, "cancelled"),
        (0.1, 0.05, "cancelled"),
        (None, 599.9, "cancelled"),  # the limit is ours: the client knows of no deadline
    ],
)
async def test_a_reader_that_is_closed_at_its_deadline_counts_as_such(
    ingress: Ingress, replicas: FakeReplicas, clock: Clock, timeout_s: float | None, after_s: float, outcome: str
) -> None:
    """Serve closes the generator where a client leaves between two messages, and cancels the task where it waits."""
    replicas.n_free = 1
    stream = ingress.generate(a_call(timeout_s=timeout_s))
    await anext(stream)
    clock.now += after_s
    await stream.aclose()
    assert (await counters(ingress))[f"requests_{outcome}"] == 1


async def test_choices_that_are_closed_at_their_deadline_count_as_such(
    ingress: Ingress, replicas: FakeReplicas, clock: Clock
) -> None:
    replicas.n_free = 1
    stream = merged(ingress, [a_call(timeout_s=2.0, api="http")] * 3)
    await anext(stream)
    clock.now += 2.0
    await stream.aclose()
    assert (await counters(ingress))["requests_deadline"] == 3


async def test_what_was_told_to_its_end_has_not_expired(ingress: Ingress, clock: Clock) -> None:
    stream = ingress.generate(a_call(timeout_s=2.0))
    while (await anext(stream)).chunk.finish_reason is None:
        pass
    clock.now += 2.0
    await stream.aclose()
    assert (await counters(ingress))["requests_length"] == 1


async def test_the_replica_is_told_what_is_left_of_the_deadline(
    ingress: Ingress, replicas: FakeReplicas, clock: Clock
) -> None:
    real = replicas.reports

    async def slow(*args: Any) -> Any:
        clock.now += 3.0
        return await real(*args)

    replicas.reports = slow  # type: ignore[method-assign]
    await read(ingress, a_call(timeout_s=10.0))
    assert replicas.streams[0].request.timeout_s == pytest.approx(7.0)
    clock.now += 100
    ingress._dispatcher._links.model = None
    with pytest.raises(DeadlineExceededError, match=r"deadline of 1 s"):
        await read(ingress, a_call(timeout_s=1.0))


async def test_no_request_outlasts_the_limit(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call())
    await read(ingress, a_call(timeout_s=1e9))
    assert [stream.request.timeout_s for stream in replicas.streams] == [CONFIG.limits.max_request_seconds] * 2


async def test_a_deadline_nobody_enforces_is_enforced_here(
    ingress: Ingress, replicas: FakeReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "DEADLINE_GRACE_S", 0.0)
    replicas.n_free = 1
    with pytest.raises(DeadlineExceededError, match=r"deadline of 0\.01 s"):
        await read(ingress, a_call(timeout_s=0.01))
    assert (await counters(ingress))["requests_deadline"] == 1
