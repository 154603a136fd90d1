"""A replica over an engine that computes when told: requests from submission to their end."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from deployment.parcels import Accepted, Failed, Rejected, Submission, unpack
from deployment.replica import Replica
from orca_core.errors import InvalidRequestError, RequestCancelledError
from orca_core.types import CancelOutcome, FinishReason, GenerationChunk, Load
from tests.deployment.plane import settle
from tests.deployment.replica_rig import HERE, Bench, a_request, bench
from tests.deployment.stepping import SteppingEngine, answer_of

__all__ = ["bench"]


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


async def test_an_idle_engine_begins_before_its_first_requests_are_acknowledged(bench: Bench) -> None:
    def is_answered_at_once(name: str) -> bool:
        asked = bench.replica.submit_all(HERE, "link", (Submission(a_request(name, 5), "mine"),))
        try:
            asked.send(None)
        except StopIteration:
            return True
        asked.close()
        return False

    parcels = await bench.attach()
    assert not is_answered_at_once("r1")
    assert list(bench.engine.running) == ["r1"]
    assert is_answered_at_once("r2")
    await parcels.aclose()
    assert is_answered_at_once("r3"), "turned down: there is nothing to begin"


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


def test_close_ends_the_engine() -> None:
    engine = SteppingEngine()
    Replica(engine, "a").close()
    assert engine.ended
