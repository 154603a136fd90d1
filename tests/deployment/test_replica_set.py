"""What the ingress hears of replicas of which one hangs or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from deployment import broadcast, replica_set
from deployment.parcels import NOTHING_WAITS, Accepted, Pinned, ReplicaReport, Submission
from deployment.peers import IngressShare
from deployment.replica_set import ServeReplicaSet
from orca_core.types import CancelOutcome, GenerationRequest, Load
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


class Call:
    """One call of a method; answered by the test."""

    def __init__(self, method: str, args: tuple[object, ...]) -> None:
        self.method, self.args = method, args
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()

    def __await__(self) -> Generator[Any, None, object]:
        return self.answer.__await__()

    def cancel(self) -> None:
        self.gone.set()


class Handle:
    """Enough of a Serve handle. ``results``: ``None`` = the replicas are not even reached."""

    def __init__(self, results: list[Result] | None) -> None:
        self.results = results
        self.method = ""
        self.calls: list[Call] = []

    def options(self, method_name: str, **_: Any) -> Handle:
        made = Handle(self.results)
        made.method, made.calls = method_name, self.calls
        return made

    def remote(self, *args: object) -> Call:
        self.calls.append(Call(self.method, args))
        return self.calls[-1]

    def broadcast(self, method: str, *_: object) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        if self.results is None:
            await asyncio.Event().wait()
        return self.results or []


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broadcast, replica_set):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)


def report(name: str) -> ReplicaReport:
    return ReplicaReport(name, INFO, Load(n_slots=128), 1.0)


async def test_a_replica_that_hangs_hides_no_other() -> None:
    hung, lost = Result(None), Result(RuntimeError("gone"))
    replicas = ServeReplicaSet(Handle([Result(report("a")), hung, lost, Result(report("b"))]))
    assert [each.replica for each in await replicas.reports("me", NOTHING_WAITS)] == ["a", "b"]
    assert hung.cancelled


async def test_a_cancel_reaches_who_can_be_reached() -> None:
    answers: list[Result] = [Result(None), Result(CancelOutcome.NOT_FOUND), Result(CancelOutcome.CANCELLED)]
    assert await ServeReplicaSet(Handle(answers)).cancel("mine") is CancelOutcome.CANCELLED


async def test_who_asks_all_can_count_those_that_did_not_answer() -> None:
    share = IngressShare("a", 1, 20)
    answers = await broadcast.ask_each(Handle([Result(share), Result(None), Result("?")]), "share", IngressShare)
    assert answers == ([share], 3)
    assert await broadcast.ask_each(Handle(None), "share", IngressShare, timeout_s=0.0) == ([], 0)


async def test_nobody_there() -> None:
    assert await ServeReplicaSet(Handle(None)).reports("me", NOTHING_WAITS) == []
    assert await ServeReplicaSet(Handle([])).cancel("mine") is CancelOutcome.NOT_FOUND


REQUEST = GenerationRequest("r1.1", (1, 2), 3, 0)


async def test_a_submission_goes_to_the_replica_that_was_named() -> None:
    handle = Handle([])
    replicas = ServeReplicaSet(handle)
    task = asyncio.create_task(replicas.submit("a", "link", REQUEST, "mine"))
    await until(lambda: bool(handle.calls))
    (call,) = handle.calls
    assert (call.method, call.args) == ("submit_all", (Pinned("a"), "link", (Submission(REQUEST, "mine"),)))
    call.answer.set_result((Accepted(1),))
    assert await task == Accepted(1)


async def test_a_submission_that_is_given_up_is_cancelled_on_its_way() -> None:
    handle = Handle([])
    task = asyncio.create_task(ServeReplicaSet(handle).submit("a", "link", REQUEST, "mine"))
    await until(lambda: bool(handle.calls))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await handle.calls[0].gone.wait()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(20):
        if holds():
            break
        await asyncio.sleep(0)
    assert holds()


async def test_a_call_for_the_first_replica_names_none_and_can_be_given_up() -> None:
    """Serve's handle keeps it until there is one, and its controller hears of that."""
    handle = Handle([])
    task = asyncio.create_task(ServeReplicaSet(handle).first())
    await asyncio.sleep(0)
    (call,) = handle.calls
    assert (call.method, call.args) == ("report", ("", NOTHING_WAITS))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.gone.is_set()


async def test_a_drop_waits_for_nobody_and_reaches_a_replica_that_has_left() -> None:
    handle = Handle([])
    ServeReplicaSet(handle).drop("a", "link", ("r1.1",))
    await asyncio.sleep(0)
    (call,) = handle.calls
    assert (call.method, call.args) == ("drop", (Pinned("a", may_have_left=True), "link", ("r1.1",)))
    await asyncio.wait_for(call.gone.wait(), 10)  # nobody answers


async def test_a_pace_waits_for_nobody() -> None:
    handle = Handle([])
    ServeReplicaSet(handle).pace("a", "link", 0.01)
    await asyncio.sleep(0)
    (call,) = handle.calls
    assert (call.method, call.args) == ("pace", (Pinned("a", may_have_left=True), "link", 0.01))
    await asyncio.wait_for(call.gone.wait(), 10)  # nobody answers


async def test_a_link_is_a_stream_from_the_replica_that_was_named() -> None:
    handle = Handle([])
    stream: Any = ServeReplicaSet(handle).attach("a", "me", "link")
    assert (stream.method, stream.args) == ("attach", (Pinned("a"), "me", "link"))
