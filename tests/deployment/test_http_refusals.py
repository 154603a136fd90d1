"""What the OpenAI HTTP face refuses before anything has begun: fields, bodies, lists, paths."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.deployment.fake_service import FakeService
from tests.deployment.http_rig import CHAT, COMPLETION, client, client_of, service

__all__ = ["client", "service"]


async def test_the_range_of_top_k_is_told_as_it_is(client: httpx.AsyncClient, service: FakeService) -> None:
    for top_k in (-2, 2**31):
        response = await client.post("/v1/completions", json={"prompt": "x", "top_k": top_k})
        assert response.status_code == 400
        assert response.json()["error"]["message"].endswith(
            "must be an integer in [0, 2147483647], or -1; 0 and -1 are off"
        )
    for top_k in (-1, 0, 2**31 - 1):
        assert (await client.post("/v1/completions", json={"prompt": "x", "top_k": top_k})).status_code == 200
    assert [call.sampling.top_k for call in service.calls] == [0, 0, 2**31 - 1]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": ["ok", "", "ok"]}, "prompt"),
    ({"prompt": ["ok", 3]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 999999}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 33, "prompt": ["a", "b"]}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": -1}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"model": 3}, "model"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize(("change", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
async def test_bad_completion_starts_nothing(
    client: httpx.AsyncClient, service: FakeService, change: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/completions", content=json.dumps({**COMPLETION, **change}))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert service.calls == []


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template": "{{ lipsum.__globals__ }}"}, "chat_template"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chat_starts_nothing(
    client: httpx.AsyncClient, service: FakeService, change: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.calls == []


async def test_defaults_of_unsupported_fields_are_accepted(client: httpx.AsyncClient) -> None:
    request = {**CHAT, "tools": [], "response_format": {"type": "text"}, "best_of": 1, "store": False, "audio": None}
    assert (await client.post("/v1/chat/completions", json=request)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"[]",
        b"",
        b"\xff\xfe{}",
    ],
    ids=range(9),
)
async def test_bodies_that_are_not_json(client: httpx.AsyncClient, service: FakeService, body: bytes) -> None:
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"
    assert service.calls == []


async def test_too_large_bodies_are_refused_unparsed(service: FakeService) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"[" * 50

    async with client_of(service, max_prompt_bytes=200) as client:
        declared = await client.post("/v1/completions", content=b"[" * 201)
        chunked = await client.post("/v1/completions", content=pieces())
        fits = await client.post("/v1/completions", json=COMPLETION)
    assert (declared.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)
    assert declared.json()["error"]["code"] == "payload_too_large"


async def test_list_starts_as_a_whole_or_not_at_all(client: httpx.AsyncClient, service: FakeService) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": ["a", "b"], "max_tokens": 65})
    assert response.status_code == 400
    assert "65" in response.json()["error"]["message"]
    assert "64" in response.json()["error"]["message"]
    assert service.calls == []


async def test_unknown_model_path_and_method(client: httpx.AsyncClient) -> None:
    for response, status in (
        (await client.post("/v1/completions", json={**COMPLETION, "model": "other"}), 404),
        (await client.get("/v1/nothing"), 404),
        (await client.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
