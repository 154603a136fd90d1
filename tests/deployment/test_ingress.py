from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from deployment import live as live_module
from deployment.choices import merged
from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.overview import Around
from deployment.serving import ChatMessage
from orca_core.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RequestCancelledError,
    RequestTooLargeError,
    UnavailableError,
)
from orca_core.types import CancelOutcome, FinishReason, SamplingParams
from tests.deployment.ingress_rig import CONFIG, Clock, FakePeers, a_call, counters, read
from tests.deployment.serving_fakes import INFO, ByteTokenizer, FakeReplicas


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def last_chance(replicas: FakeReplicas, clock: Clock) -> AsyncIterator[Ingress]:
    """An ingress that resumes nothing."""
    made = Ingress(AppConfig.parse({"failover": {"max_resumes": 0}}), replicas, ByteTokenizer(), clock)
    yield made
    made.close()


@pytest.fixture
async def ingress(replicas: FakeReplicas, clock: Clock) -> AsyncIterator[Ingress]:
    made = Ingress(CONFIG, replicas, ByteTokenizer(), clock)
    yield made
    made.close()


async def test_a_stream_from_end_to_end(ingress: Ingress, replicas: FakeReplicas) -> None:
    stream = await read(ingress, a_call(client_request_id="mine"))
    assert "".join(served.chunk.text for served in stream) == "t0 t1 t2 "
    assert {served.request_id for served in stream} == {"mine"}
    assert [served.chunk.finish_reason for served in stream] == [None, None, FinishReason.LENGTH]
    assert stream[-1].replica == "replica-1"
    request = replicas.streams[0].request
    assert request.token_ids == tuple(b"hello")
    assert request.max_new_tokens == 3
    assert await counters(ingress) == {
        "requests": 1, "requests_length": 1, "prompt_tokens": 5, "generated_tokens": 3,
    }  # fmt: skip


async def test_our_id_is_never_the_clients(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call(client_request_id="mine"))
    await read(ingress, a_call(client_request_id="mine"))
    ids = {stream.request.request_id for stream in replicas.streams}
    assert len(ids) == 2
    assert not any("mine" in request_id for request_id in ids)


async def test_without_a_clients_id_ours_is_echoed(ingress: Ingress, replicas: FakeReplicas) -> None:
    stream = await read(ingress, a_call())
    assert f"{stream[0].request_id}.1" == replicas.streams[0].request.request_id


async def test_a_chat_is_encoded_as_one(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call(prompt=None, messages=(ChatMessage("user", "hi"),)))
    assert replicas.streams[0].request.token_ids == tuple(b"<user>hi")


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"prompt": ""}, InvalidRequestError, "prompt"),
        ({"prompt": None}, InvalidRequestError, "exactly one"),
        ({"token_ids": (1,)}, InvalidRequestError, "exactly one"),
        ({"prompt": None, "token_ids": ()}, InvalidRequestError, "prompt"),
        ({"prompt": None, "token_ids": (5, 1000)}, InvalidRequestError, "from 0 to 999"),
        ({"prompt": None, "token_ids": (-1,)}, InvalidRequestError, "from 0 to 999"),
        ({"prompt": None, "messages": ()}, InvalidRequestError, "messages"),
        ({"prompt": None, "messages": (ChatMessage("user", ""),)}, InvalidRequestError, "messages"),
        ({"prompt": "x" * 101}, PayloadTooLargeError, "101 bytes"),
        ({"prompt": None, "messages": (ChatMessage("user", "é" * 51),)}, PayloadTooLargeError, "102 bytes"),
        ({"model": "other"}, NotFoundError, "other"),
        ({"sampling": SamplingParams(stop=("a", "b", "c"))}, InvalidRequestError, "stop"),
        ({"sampling": SamplingParams(logit_bias={1000: 1.0})}, InvalidRequestError, "logit_bias"),
        ({"sampling": SamplingParams(max_new_tokens=60)}, RequestTooLargeError, "5 tokens .* 60 = 65 .* 64"),
        ({"client_request_id": "x" * 257}, InvalidRequestError, "request_id"),
        ({"session_id": "x" * 257}, InvalidRequestError, "session_id"),
        ({"timeout_s": -1.0}, DeadlineExceededError, "deadline"),
    ],
)
async def test_bad_input_never_reaches_a_replica(
    ingress: Ingress, replicas: FakeReplicas, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        await read(ingress, a_call(**given))
    assert not replicas.streams


async def test_a_prompt_above_the_byte_limit_is_not_tokenised(replicas: FakeReplicas) -> None:
    tokenizer = ByteTokenizer()
    ingress = Ingress(CONFIG, replicas, tokenizer)
    with pytest.raises(PayloadTooLargeError):
        await read(ingress, a_call(prompt="x" * 101))
    assert tokenizer.n_calls == 0
    ingress.close()


async def test_bad_input_leaves_an_open_stream_alone(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    with pytest.raises(InvalidRequestError):
        await read(ingress, a_call(prompt=""))
    assert replicas.streams[0].n_cancels == 0
    replicas.n_free = 10
    replicas.streams[0].ended.set()
    assert [served.chunk.text async for served in stream] == ["t1 ", "t2 "]


@pytest.mark.parametrize("role", ["", "User", "user\n", "user<|im_end|>", "a b", "tool", "root"])
async def test_a_role_is_one_of_few(ingress: Ingress, replicas: FakeReplicas, role: str) -> None:
    """Whatever else it holds could end its turn in the template and speak as somebody else."""
    with pytest.raises(InvalidRequestError, match="one of system"):
        await read(ingress, a_call(prompt=None, messages=(ChatMessage(role, "hi"),)))
    assert not replicas.streams


async def test_a_developer_speaks_as_the_system(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call(prompt=None, messages=(ChatMessage("developer", "hi"),)))
    assert bytes(replicas.streams[0].request.token_ids) == b"<system>hi"


async def test_choices_that_can_never_wait_together_are_refused(ingress: Ingress, replicas: FakeReplicas) -> None:
    """A 429 would promise that it helps to come back."""
    room = INFO.n_slots + CONFIG.limits.max_waiting_slots
    call = a_call(prompt="ab", sampling=SamplingParams(max_new_tokens=62))
    await ingress.check([call] * (room // 64))
    with pytest.raises(InvalidRequestError, match=f"need {room + 64} slots together, .* have {room}"):
        await ingress.check([call] * (room // 64 + 1))


async def test_a_chat_of_a_million_messages_is_refused_unread(ingress: Ingress, replicas: FakeReplicas) -> None:
    with pytest.raises(InvalidRequestError, match="at most 4096 messages"):
        await read(ingress, a_call(prompt=None, messages=(ChatMessage("user", ""),) * 4097))
    assert not replicas.streams


async def test_check_starts_nothing(ingress: Ingress, replicas: FakeReplicas) -> None:
    """Field case C17: a list of prompts starts as a whole or not at all."""
    await ingress.check([a_call(), a_call()])
    with pytest.raises(InvalidRequestError):
        await ingress.check([a_call(), a_call(prompt=""), a_call()])
    assert not replicas.streams


async def test_a_reader_that_leaves_cancels(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)
    assert replicas.streams[0].n_cancels == 1
    assert replicas.dropped == [replicas.streams[0].request.request_id]
    assert (await counters(ingress))["requests_cancelled"] == 1


async def test_a_cancelled_task_cancels(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 0
    task = asyncio.create_task(read(ingress, a_call()))
    await replicas.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert replicas.streams[0].n_cancels == 1
    assert (await counters(ingress))["requests_cancelled"] == 1


async def test_a_finished_stream_is_not_cancelled(ingress: Ingress, replicas: FakeReplicas) -> None:
    await read(ingress, a_call())
    assert replicas.streams[0].n_cancels == 0
    assert not replicas.dropped


async def test_draining_refuses_what_comes_and_finishes_what_is_open(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    assert await ingress.drain() == 1
    for refused in (read(ingress, a_call()), ingress.check([a_call()])):
        with pytest.raises(UnavailableError, match="draining"):
            await refused
    assert not await ingress.ready()
    assert (await ingress.status()).draining
    replicas.streams[0].ended.set()
    assert [served.chunk.finish_reason async for served in stream] == [None, FinishReason.LENGTH]
    assert await ingress.drain() == 0


async def test_what_is_open_when_the_drain_ends_is_lost_and_says_so(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    stream = ingress.generate(a_call())
    await anext(stream)
    await ingress.drain()
    await ingress.end_open()
    with pytest.raises(UnavailableError, match="shut down"):
        await anext(stream)
    assert await ingress.drain() == 0


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


async def test_a_lost_stream_is_never_a_normal_end(last_chance: Ingress, replicas: FakeReplicas) -> None:
    """Field case B10."""
    replicas.cut_after = 2
    with pytest.raises(UnavailableError):
        await read(last_chance, a_call())
    assert (await counters(last_chance))["requests_error"] == 1


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError"])
async def test_a_dead_replica_is_unavailable(last_chance: Ingress, replicas: FakeReplicas, name: str) -> None:
    import ray.exceptions

    kind = getattr(ray.exceptions, name)
    replicas.cut_after = 1
    replicas.error = kind() if name == "ActorDiedError" else kind("no answer", b"x" * 16)
    with pytest.raises(UnavailableError):
        await read(last_chance, a_call())


async def test_an_unknown_error_says_nothing_but_the_id(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.submit_error = InternalError("r.1")
    replicas.submit_error.__cause__ = ValueError("the secret prompt")
    with pytest.raises(InternalError) as caught:
        await read(ingress, a_call(client_request_id="mine"))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


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


async def test_cancel_by_the_clients_id(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.n_free = 1
    streams = [ingress.generate(a_call(client_request_id="mine")) for _ in range(2)]
    other = ingress.generate(a_call(client_request_id="other"))
    for stream in (*streams, other):
        await anext(stream)
    assert await ingress.cancel("mine") is CancelOutcome.CANCELLED
    for stream in streams:
        with pytest.raises(RequestCancelledError, match="mine"):
            await anext(stream)
    assert replicas.cancels == ["mine"]
    assert replicas.streams[2].n_cancels == 0
    await other.aclose()


@pytest.mark.parametrize("outcome", list(CancelOutcome))
async def test_cancel_asks_the_replicas_for_what_another_ingress_started(
    ingress: Ingress, replicas: FakeReplicas, outcome: CancelOutcome
) -> None:
    replicas.outcome = outcome
    assert await ingress.cancel("elsewhere") is outcome


async def test_cancel_asks_the_other_ingresses_for_what_waits_in_their_line(replicas: FakeReplicas) -> None:
    peers = FakePeers()
    ingress = Ingress(CONFIG, replicas, ByteTokenizer(), around=Around(peers))
    assert await ingress.cancel("elsewhere") is CancelOutcome.CANCELLED
    assert peers.asked == ["elsewhere"]
    assert await ingress.cancel_here("elsewhere") is CancelOutcome.NOT_FOUND
    ingress.close()


async def test_the_model_has_the_public_name_and_the_largest_pool(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.infos = [INFO, replace(INFO, n_slots=256)]
    model = await ingress.model()
    assert (model.model_id, model.n_slots) == ("our-name", 256)


async def test_no_replica_is_unavailable_until_there_is_one(ingress: Ingress, replicas: FakeReplicas) -> None:
    replicas.infos = []
    assert not await ingress.ready()
    with pytest.raises(UnavailableError):
        await read(ingress, a_call())
    status = await ingress.status()
    assert (status.model.model_id, status.model.n_slots, status.replicas) == ("our-name", 0, ())
    replicas.infos = [INFO]
    assert len(await read(ingress, a_call())) == 3


async def test_readiness_does_not_ask_at_every_probe(ingress: Ingress, replicas: FakeReplicas, clock: Clock) -> None:
    assert [await ingress.ready() for _ in range(5)] == [True] * 5
    assert replicas.n_reports == 1
    replicas.infos = []
    clock.now += 10
    assert not await ingress.ready()


async def test_tokens_and_text(ingress: Ingress) -> None:
    assert await ingress.tokenize("abc") == [97, 98, 99]
    assert await ingress.detokenize((97, 98)) == "ab"
    with pytest.raises(InvalidRequestError, match="from 0 to 999"):
        await ingress.detokenize((1000,))
    with pytest.raises(PayloadTooLargeError):
        await ingress.tokenize("x" * 101)
    for attempt in (ingress.tokenize("a", "other"), ingress.detokenize((97,), "other")):
        with pytest.raises(NotFoundError):
            await attempt
