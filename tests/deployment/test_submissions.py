"""Requests that are submitted together go in few calls, and none of them depends on another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest

from deployment.parcels import Accepted, Failed, Rejected, Standing, Submission
from deployment.submissions import MAX_CALLS, MAX_REQUESTS, Answer, Submissions
from orca_core.errors import InvalidRequestError, UnavailableError
from orca_core.types import GenerationRequest, Load

ACCEPTED = Accepted(1)
LOAD = Load(64)


def a_submission(name: str) -> Submission:
    return Submission(GenerationRequest(name, (1, 2), 3, 0), "mine")


@dataclass
class Wire:
    """The calls, answered by the test: by default everything is accepted."""

    calls: list[tuple[str, str, list[str], asyncio.Future[Sequence[Answer]]]] = field(default_factory=list)
    n_cancelled: int = 0
    tasks: list[asyncio.Task[Accepted | Rejected]] = field(default_factory=list)

    async def send(self, replica: str, link_id: str, submissions: tuple[Submission, ...]) -> Sequence[Answer]:
        answer: asyncio.Future[Sequence[Answer]] = asyncio.get_running_loop().create_future()
        self.calls.append((replica, link_id, [each.request.request_id for each in submissions], answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise

    @property
    def carried(self) -> list[list[str]]:
        return [names for _, _, names, _ in self.calls]

    def accept(self, index: int) -> None:
        _, _, names, answer = self.calls[index]
        answer.set_result([Accepted(number) for number, _ in enumerate(names, 1)])


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
async def wire() -> AsyncGenerator[Wire, None]:
    wire = Wire()
    yield wire
    for task in wire.tasks:
        task.cancel()
    await settle()


class Office(Submissions):
    """Under test, with what the test has begun, which ends with it."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.send)
        self.wire = wire


@pytest.fixture
def submissions(wire: Wire) -> Office:
    return Office(wire)


def begin(submissions: Office, *names: str, link: str = "link") -> list[asyncio.Task[Accepted | Rejected]]:
    tasks = [asyncio.create_task(submissions.submit("a", link, a_submission(name))) for name in names]
    submissions.wire.tasks += tasks
    return tasks


async def test_what_comes_in_one_instant_goes_in_one_call_and_in_order(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2", "3")
    await settle()
    assert wire.carried == [["1", "2", "3"]]
    wire.accept(0)
    assert await asyncio.gather(*tasks) == [Accepted(1), Accepted(2), Accepted(3)]


async def test_a_lone_request_does_not_wait_for_the_answer_of_another(wire: Wire, submissions: Office) -> None:
    begin(submissions, "1")
    await settle()
    begin(submissions, "2")
    await settle()
    assert wire.carried == [["1"], ["2"]]


async def test_more_wait_until_a_call_is_answered_and_then_go_together(wire: Wire, submissions: Office) -> None:
    for index in range(MAX_CALLS):
        begin(submissions, f"first {index}")
        await settle()
    for name in ("1", "2", "3"):
        begin(submissions, name)
        await settle()
    assert len(wire.calls) == MAX_CALLS
    wire.accept(0)
    await settle()
    assert wire.carried[MAX_CALLS:] == [["1", "2", "3"]]


async def test_a_call_carries_so_many_and_the_rest_goes_in_the_next(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, *(str(index) for index in range(MAX_REQUESTS * MAX_CALLS + 1)))
    await settle()
    assert [len(names) for names in wire.carried] == [MAX_REQUESTS] * MAX_CALLS
    wire.accept(1)
    await settle()
    assert wire.carried[MAX_CALLS:] == [[str(MAX_REQUESTS * MAX_CALLS)]]
    wire.accept(0)
    wire.accept(2)
    assert len(await asyncio.gather(*tasks)) == len(tasks)


async def test_links_do_not_wait_for_each_other(wire: Wire, submissions: Office) -> None:
    for index in range(MAX_CALLS):
        begin(submissions, f"first {index}")
        await settle()
    begin(submissions, "1", link="other")
    await settle()
    assert wire.calls[-1][:3] == ("a", "other", ["1"])


async def test_each_gets_its_own_answer(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2", "3", "4")
    await settle()
    rejected = Rejected(Standing(LOAD, 1.0, 0))
    wire.calls[0][3].set_result([ACCEPTED, InvalidRequestError("prompt", "is wrong"), rejected, Failed("KeyError")])
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[0] == ACCEPTED
    assert isinstance(answers[1], InvalidRequestError)
    assert answers[2] == rejected
    assert isinstance(answers[3], RuntimeError)


async def test_a_call_that_fails_fails_for_all_of_it_and_nobody_else(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2")
    await settle()
    others = begin(submissions, "3")
    await settle()
    wire.calls[0][3].set_exception(UnavailableError("the replica has left"))
    wire.accept(1)
    answers = await asyncio.gather(*tasks, *others, return_exceptions=True)
    assert [type(answer) for answer in answers] == [UnavailableError, UnavailableError, Accepted]


async def test_an_answer_too_few_fails_the_call(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2")
    await settle()
    wire.calls[0][3].set_result([ACCEPTED])
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[0] == ACCEPTED
    assert isinstance(answers[1], ValueError)


async def test_who_gives_up_before_it_was_sent_is_not_sent(wire: Wire, submissions: Office) -> None:
    first, _ = begin(submissions, "1", "2")
    await asyncio.sleep(0)
    first.cancel()
    await settle()
    assert wire.carried == [["2"]]


async def test_who_gives_up_while_it_is_sent_takes_nobody_along(wire: Wire, submissions: Office) -> None:
    first, second = begin(submissions, "1", "2")
    await settle()
    first.cancel()
    await settle()
    wire.accept(0)
    assert await second == Accepted(2)
    assert wire.n_cancelled == 0


async def test_a_call_of_which_all_give_up_is_cancelled_and_holds_up_nobody(wire: Wire, submissions: Office) -> None:
    stuck = []
    for index in range(MAX_CALLS):
        stuck += begin(submissions, f"stuck {index}", f"stuck too {index}")
        await settle()
    waiting = begin(submissions, "1")
    await settle()
    for task in stuck:
        task.cancel()
    await settle()
    assert wire.n_cancelled == MAX_CALLS
    assert wire.carried[MAX_CALLS:] == [["1"]]
    wire.accept(MAX_CALLS)
    assert await waiting[0] == ACCEPTED


async def test_a_call_that_is_cancelled_from_outside_cancels_all_of_it(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2")
    await settle()
    wire.calls[0][3].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError] * 2


async def test_nothing_is_kept_of_what_is_over(wire: Wire, submissions: Office) -> None:
    tasks = begin(submissions, "1", "2")
    await settle()
    wire.accept(0)
    await asyncio.gather(*tasks)
    await settle()
    assert not submissions._waiting
    assert not submissions._n_calls
    assert not submissions._tasks
