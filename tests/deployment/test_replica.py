"""A replica over an engine that computes when told."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncGenerator

import pytest

from deployment.parcels import Accepted, Failed, LineDepth, Parcel, Pinned, Rejected, Submission, unpack
from deployment.replica import LEASE_S, LINE_FRESH_S, Replica
from deployment.served_replica import share_of_node, use_threads
from orca_core.errors import EngineDeadError, InvalidRequestError, RequestCancelledError
from orca_core.types import CancelOutcome, FinishReason, GenerationChunk, GenerationRequest, Health, Load
from tests.deployment.plane import Clock, settle
from tests.deployment.stepping import SteppingEngine, answer_of

HERE = Pinned("a")


def a_request(request_id: str = "r1", max_new_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2), max_new_tokens, 0)


class Bench:
    """A replica and one ingress's stream from it."""

    def __init__(self, n_slots: int = 128, heartbeat_s: float = 3600.0) -> None:
        self.engine = SteppingEngine(n_slots)
        self.clock = Clock(0.0)
        self.replica = Replica(self.engine, "a", lambda: 12.0, heartbeat_s=heartbeat_s, monotonic=self.clock)

    async def attach(self, ingress: str = "i", link: str = "link") -> AsyncGenerator[Parcel, None]:
        parcels = self.replica.attach(HERE, ingress, link)
        await anext(parcels)
        return parcels

    async def submit(self, request: GenerationRequest, link: str = "link", client: str = "mine") -> Accepted | Rejected:
        answer = self.replica.submit(request, link, client)
        assert pickle.loads(pickle.dumps(answer)) == answer
        return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_an_accepted_request_speaks_over_the_link(bench: Bench) -> None:
    parcels = await bench.attach()
    request = a_request()
    assert await bench.submit(request) == Accepted(1)
    tokens: list[int] = []
    for _ in range(3):
        bench.engine.step()
        (word,) = (await anext(parcels)).words
        chunk = unpack(word)
        assert isinstance(chunk, GenerationChunk)
        tokens += chunk.token_ids
    assert tokens == answer_of(request)
    assert chunk.finish_reason is FinishReason.LENGTH
    await parcels.aclose()


async def test_the_engine_is_started_beside_the_event_loop(bench: Bench) -> None:
    await bench.replica.start()
    assert bench.engine.started


async def test_what_does_not_fit_now_is_turned_down_and_nothing_has_happened(bench: Bench) -> None:
    parcels = await bench.attach()
    assert isinstance(await bench.submit(a_request("r1", 98)), Accepted)
    answer = await bench.submit(a_request("r2", 27))
    assert isinstance(answer, Rejected)
    assert answer.standing.load == Load(n_slots=128, reserved_slots=100, used_slots=2, running=1)
    assert answer.standing.n_accepted == 1
    assert await bench.submit(a_request("r2", 26)) == Accepted(2)  # precisely what is left
    await parcels.aclose()


async def test_a_request_is_begun_once_however_often_it_is_submitted(bench: Bench) -> None:
    parcels = await bench.attach()
    assert [await bench.submit(a_request()) for _ in range(3)] == [Accepted(1)] * 3
    assert len(bench.engine.seen) == 1
    for _ in range(3):
        bench.engine.step()
    await anext(parcels)
    assert await bench.submit(a_request()) == Accepted(1)
    assert len(bench.engine.seen) == 1
    await parcels.aclose()


async def test_without_a_link_to_speak_over_nothing_is_begun(bench: Bench) -> None:
    parcels = await bench.attach()
    assert isinstance(await bench.submit(a_request(), link="other"), Rejected)
    await parcels.aclose()
    assert isinstance(await bench.submit(a_request()), Rejected)
    assert not bench.engine.seen


async def test_leaving_frees_the_requests(bench: Bench) -> None:
    parcels = await bench.attach()
    await bench.submit(a_request())
    await parcels.aclose()
    assert not bench.engine.running
    assert await bench.replica.cancel("mine") is CancelOutcome.ALREADY_FINISHED


async def test_a_cancelled_reader_frees_the_requests(bench: Bench) -> None:
    async def read() -> None:
        async for _ in bench.replica.attach(HERE, "i", "link"):
            pass

    task = asyncio.create_task(read())
    await settle()
    await bench.submit(a_request())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert not bench.engine.running


async def test_a_later_stream_of_an_ingress_takes_the_place_of_the_earlier(bench: Bench) -> None:
    earlier, other = await bench.attach(), await bench.attach("other", "o")
    await bench.submit(a_request("r1"))
    await bench.submit(a_request("r2"), link="o")
    later = await bench.attach("i", "link 2")
    assert list(bench.engine.running) == ["r2"]
    with pytest.raises(StopAsyncIteration):
        await anext(earlier)
    assert await bench.submit(a_request("r3"), link="link 2") == Accepted(1)
    for parcels in (later, other):
        await parcels.aclose()
    assert not bench.engine.running


async def test_the_requests_own_error_is_the_callers(bench: Bench) -> None:
    parcels = await bench.attach()
    bench.engine.error = InvalidRequestError("logit_bias", "is wrong")
    with pytest.raises(InvalidRequestError):
        await bench.submit(a_request())
    assert await bench.replica.cancel("mine") is CancelOutcome.NOT_FOUND
    await parcels.aclose()


async def test_several_at_once_are_answered_one_by_one(bench: Bench) -> None:
    await bench.attach()
    bench.engine.bad_ids = {"bad": InvalidRequestError("logit_bias", "is wrong"), "odd": KeyError("odd")}
    asked = tuple(Submission(a_request(name), "mine") for name in ("r1", "bad", "odd", "r2", "r1"))
    answers = await bench.replica.submit_all(HERE, "link", asked)
    assert answers[0] == Accepted(1)
    assert isinstance(answers[1], InvalidRequestError)
    assert answers[2] == Failed("KeyError")
    assert answers[3] == Accepted(2)
    assert answers[4] == Accepted(1)  # it was there before
    assert pickle.loads(pickle.dumps(answers[3])) == answers[3]


async def test_a_dropped_request_ends(bench: Bench) -> None:
    parcels = await bench.attach()
    await bench.submit(a_request())
    await bench.replica.drop(HERE, "link", ("r1",))
    assert not bench.engine.running
    assert (await anext(parcels)).words == ()
    await parcels.aclose()


async def test_a_dropped_request_that_arrives_late_is_not_begun(bench: Bench) -> None:
    """Field case A2: the cancel overtakes the request."""
    parcels = await bench.attach()
    await bench.replica.drop(HERE, "link", ("r1",))
    assert isinstance(await bench.submit(a_request()), Rejected)
    assert not bench.engine.seen
    await parcels.aclose()


async def test_each_ingress_has_a_pace_of_its_own(bench: Bench) -> None:
    parcels = await bench.attach()
    await bench.replica.pace(HERE, "link", 0.5)
    await bench.replica.pace(HERE, "another link", 0.25)
    paces = {each.link_id: each.outlet.pace_s for each in bench.replica._attached.values()}
    assert paces == {"link": 0.5}
    await parcels.aclose()


async def test_cancel_has_three_answers(bench: Bench) -> None:
    """Field case A12."""
    parcels = await bench.attach()
    assert await bench.replica.cancel("mine") is CancelOutcome.NOT_FOUND
    await bench.submit(a_request())
    assert await bench.replica.cancel("mine") is CancelOutcome.CANCELLED
    (word,) = (await anext(parcels)).words
    assert isinstance(unpack(word), RequestCancelledError)
    assert await bench.replica.cancel("mine") is CancelOutcome.ALREADY_FINISHED
    await parcels.aclose()


async def test_cancel_reaches_every_request_of_a_client_id(bench: Bench) -> None:
    parcels = await bench.attach()
    for i in range(3):
        await bench.submit(a_request(f"r{i}"), client="shared")
    await bench.submit(a_request("other"), client="other")
    assert await bench.replica.cancel("shared") is CancelOutcome.CANCELLED
    assert list(bench.engine.running) == ["other"]
    await parcels.aclose()


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


def test_close_ends_the_engine() -> None:
    engine = SteppingEngine()
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
