from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import aclosing

import pytest

from deployment.replica import LINE_FRESH_S, Replica, share_of_node, use_threads
from deployment.router import load_from_stats
from orca_core.errors import DeadlineExceededError, EngineDeadError, RequestCancelledError
from orca_core.types import CancelOutcome, FinishReason, GenerationRequest, Health, Load
from tests.deployment.serving_fakes import INFO, FakeEngine


def a_request(request_id: str = "r1", max_new_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2), max_new_tokens, 0)


async def test_chunks_come_with_the_replicas_name() -> None:
    engine = FakeEngine()
    replica = Replica(engine, "replica-7")
    pairs = [pair async for pair in replica.generate(a_request(), "mine")]
    assert [name for name, _ in pairs] == ["replica-7"] * 3
    assert "".join(chunk.text for _, chunk in pairs) == "t0 t1 t2 "
    assert pairs[-1][1].finish_reason is FinishReason.LENGTH
    assert engine.closed == ["r1"]


async def test_the_engine_is_started_beside_the_event_loop() -> None:
    engine = FakeEngine()
    await Replica(engine, "a").start()
    assert engine.started


async def test_leaving_early_frees_the_request() -> None:
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a")
    async with aclosing(replica.generate(a_request(), "mine")) as stream:
        await anext(stream)
        assert list(engine.live) == ["r1"]
    assert not engine.live


async def test_a_cancelled_task_frees_the_request() -> None:
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a")
    first = asyncio.Event()

    async def read() -> None:
        async with aclosing(replica.generate(a_request(), "mine")) as stream:
            async for _ in stream:
                first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live
    assert await replica.cancel("mine") is CancelOutcome.ALREADY_FINISHED


async def test_the_requests_error_comes_through_and_frees_it() -> None:
    engine = FakeEngine()
    engine.error = DeadlineExceededError(1.0)
    with pytest.raises(DeadlineExceededError):
        async for _ in Replica(engine, "a").generate(a_request(), "mine"):
            pass
    assert not engine.live


async def test_an_abandoned_request_ends() -> None:
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a")
    stream = replica.generate(a_request(), "mine")
    await anext(stream)
    assert await replica.abandon("r1") is CancelOutcome.CANCELLED
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    assert not engine.live


async def test_an_abandoned_request_that_arrives_late_is_not_begun() -> None:
    """Field case A2: the cancel overtakes the request."""
    engine = FakeEngine()
    replica = Replica(engine, "a")
    await replica.abandon("r1")
    with pytest.raises(RequestCancelledError):
        await anext(replica.generate(a_request(), "mine"))
    assert not engine.live
    assert not engine.closed


async def test_cancel_has_three_answers() -> None:
    """Field case A12."""
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a")
    assert await replica.cancel("mine") is CancelOutcome.NOT_FOUND
    async with aclosing(replica.generate(a_request(), "mine")) as stream:
        await anext(stream)
        assert await replica.cancel("mine") is CancelOutcome.CANCELLED
        with pytest.raises(RequestCancelledError):
            await anext(stream)
    assert await replica.cancel("mine") is CancelOutcome.ALREADY_FINISHED


async def test_cancel_reaches_every_request_of_a_client_id() -> None:
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a")
    streams = [replica.generate(a_request(f"r{i}"), "shared") for i in range(3)]
    other = replica.generate(a_request("other"), "other")
    for stream in (*streams, other):
        await anext(stream)
    assert await replica.cancel("shared") is CancelOutcome.CANCELLED
    for stream in streams:
        with pytest.raises(RequestCancelledError):
            await anext(stream)
    assert list(engine.live) == ["other"]
    await other.aclose()


async def test_reports() -> None:
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a", clock=lambda: 12.0)
    stream = replica.generate(a_request(), "mine")
    await anext(stream)
    load = Load(n_slots=128, reserved_slots=5, running=1)
    assert load_from_stats(await replica.record_routing_stats()) == (load, 12.0)
    report = await replica.report()
    assert (report.replica, report.info, report.load, report.taken_at) == ("a", INFO, load, 12.0)
    assert pickle.loads(pickle.dumps(report)) == report
    await stream.aclose()


async def test_health_is_the_engines() -> None:
    engine = FakeEngine()
    replica = Replica(engine, "a")
    await replica.check_health()
    engine.well = Health(False, "no iteration has ended for 60 s")
    with pytest.raises(EngineDeadError, match="no iteration"):
        await replica.check_health()


def test_close_ends_the_engine() -> None:
    engine = FakeEngine()
    Replica(engine, "a").close()
    assert engine.ended


def test_thread_pools_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    use_threads(None)
    assert os.environ["OMP_NUM_THREADS"] == "8"
    use_threads(1)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("mine", "there", "share"), [(1.0, 4.0, 0.25), (8.0, 4.0, 1.0), (0.0, 4.0, 1.0), (1.0, 0.0, 1.0)]
)
def test_a_replica_counts_on_its_cpus_part_of_the_ram(
    monkeypatch: pytest.MonkeyPatch, mine: float, there: float, share: float
) -> None:
    import ray

    class Context:
        def get_assigned_resources(self) -> dict[str, float]:
            return {"CPU": mine} if mine else {}

        def get_node_id(self) -> str:
            return "here"

    nodes = [{"NodeID": "other", "Resources": {"CPU": 99.0}}, {"NodeID": "here", "Resources": {"CPU": there}}]
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert share_of_node() == share


async def test_the_autoscaler_hears_of_load_and_lines() -> None:
    now = [100.0]
    engine = FakeEngine(n_free=1)
    replica = Replica(engine, "a", lambda: now[0])
    await replica.note_line("ingress-1", 300, 3)
    await replica.note_line("ingress-2", 40, 1)
    await replica.note_line("ingress-1", 200, 2)
    async with aclosing(replica.generate(a_request(), "mine")) as stream:
        await anext(stream)
        stats = await replica.record_autoscaling_stats()
    assert stats["orca_reserved_slots"] == 5
    assert (stats["orca_line_slots"], stats["orca_line_requests"]) == (240, 3)
    now[0] += LINE_FRESH_S + 0.1
    await replica.note_line("ingress-2", 0, 0)
    stats = await replica.record_autoscaling_stats()
    assert (stats["orca_line_slots"], stats["orca_line_requests"]) == (0, 0), "an ingress that died leaves no queue"
