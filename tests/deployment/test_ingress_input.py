"""What the ingress refuses before it asks a replica, and what it makes of the rest: prompts, chats, choices."""

from __future__ import annotations

from typing import Any

import pytest

from deployment.ingress import Ingress
from deployment.serving import ChatMessage
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RequestTooLargeError,
)
from orca_core.types import SamplingParams
from tests.deployment.ingress_rig import CONFIG, a_call, clock, ingress, read, replicas
from tests.deployment.serving_fakes import INFO, ByteTokenizer, FakeReplicas

__all__ = ["clock", "ingress", "replicas"]


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
