"""What a replica says of itself, to the ingresses and to Serve, and whom it gives up."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from deployment.parcels import LineDepth
from deployment.replica import LEASE_S, LINE_FRESH_S, Replica
from orca_core.errors import EngineDeadError
from orca_core.types import Health, Load
from tests.deployment.plane import settle
from tests.deployment.replica_rig import Bench, a_request, bench
from tests.deployment.stepping import SteppingEngine

__all__ = ["bench"]


async def test_every_ingress_hears_that_slots_are_free(bench: Bench) -> None:
    busy, idle = await bench.attach(), await bench.attach("other", "o")
    await bench.submit(a_request("r1", 1))
    await settle()
    waiting = asyncio.create_task(anext(idle))  # type: ignore[arg-type]
    bench.engine.step()
    await anext(busy)
    parcel = await waiting
    assert (parcel.words, parcel.standing.load.headroom) == ((), 128)
    for parcels in (busy, idle):
        await parcels.aclose()


async def test_an_ingress_that_shows_no_life_is_given_up() -> None:
    bench = Bench(heartbeat_s=1.0)
    silent, lives = await bench.attach(), await bench.attach("other", "o")
    await bench.submit(a_request("r1"))
    await bench.submit(a_request("r2"), link="o")
    bench.clock.now += LEASE_S
    await bench.replica.report("other")
    bench.replica._beat_now()
    assert list(bench.engine.running) == ["r1", "r2"]
    bench.clock.now += 1.0
    bench.replica._beat_now()
    assert list(bench.engine.running) == ["r2"]
    with pytest.raises(StopAsyncIteration):
        await anext(silent)
    await lives.aclose()
    slow = Bench(heartbeat_s=10.0)
    parcels = await slow.attach()
    slow.clock.now += 2 * LEASE_S
    slow.replica._beat_now()
    await slow.submit(a_request())
    assert slow.engine.running  # it is not asked any more often than that
    await parcels.aclose()


async def test_a_heartbeat_goes_out_when_there_is_no_news(bench: Bench) -> None:
    parcels = await bench.attach()
    waiting = asyncio.create_task(anext(parcels))  # type: ignore[arg-type]
    await settle()
    assert not waiting.done()
    bench.clock.now += 0.5
    bench.engine.well = Health(False, "no iteration has ended for 60 s")
    bench.replica._beat_now()
    assert (await waiting).standing == (Load(n_slots=128), 0.5, 0, False)
    await parcels.aclose()


async def test_reports(bench: Bench) -> None:
    parcels = await bench.attach()
    await bench.submit(a_request())
    report = await bench.replica.report()
    load = Load(n_slots=128, reserved_slots=5, used_slots=2, running=1)
    assert (report.replica, report.info, report.load) == ("a", bench.engine.info(), load)
    assert (report.taken_at, report.well) == (12.0, True)
    assert pickle.loads(pickle.dumps(report)) == report
    await parcels.aclose()


async def test_the_autoscaler_hears_of_load_and_lines(bench: Bench) -> None:
    now = [100.0]
    replica = Replica(bench.engine, "a", lambda: now[0])
    await replica.report("ingress-1", LineDepth(300, 3))
    await replica.report("ingress-2", LineDepth(40, 1))
    await replica.report("ingress-1", LineDepth(200, 2))
    bench.engine.submit(a_request())
    stats = await replica.record_autoscaling_stats()
    assert stats["orca_reserved_slots"] == 5
    assert (stats["orca_line_slots"], stats["orca_line_requests"]) == (240, 3)
    now[0] += LINE_FRESH_S + 0.1
    await replica.report("ingress-2", LineDepth(0, 0))
    stats = await replica.record_autoscaling_stats()
    assert (stats["orca_line_slots"], stats["orca_line_requests"]) == (0, 0), "an ingress that died leaves no queue"


async def test_health_is_the_engines() -> None:
    engine = SteppingEngine()
    replica = Replica(engine, "a")
    await replica.check_health()
    engine.well = Health(False, "no iteration has ended for 60 s")
    with pytest.raises(EngineDeadError, match="no iteration"):
        await replica.check_health()
