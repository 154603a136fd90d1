"""The OpenAI HTTP face over a fake service: whole answers and streams, and what of a request reaches the service."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from deployment.http_api import build_app
from orca_core.errors import UnavailableError
from tests.deployment.fake_service import MODEL, WORDS, FakeService
from tests.deployment.http_rig import CHAT, COMPLETION, TEXT, client, client_of, events, service

__all__ = ["client", "service"]


async def test_whole_completion(client: httpx.AsyncClient, service: FakeService) -> None:
    response = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine-1"})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-orca-replica"] == "r1"
    assert body["object"] == "text_completion"
    assert (body["id"], body["created"], body["model"]) == ("cmpl-mine-1", 1700000000, MODEL.model_id)
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert service.calls[0].client_request_id == "mine-1"
    assert service.open == 0


async def test_defaults_are_those_of_openai(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post("/v1/completions", json=COMPLETION)
    sampling = service.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed) == (1.0, 1.0, None, None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_equals_whole(client: httpx.AsyncClient, path: str) -> None:
    base = CHAT if "chat" in path else COMPLETION
    whole = (await client.post(path, json=base)).json()
    request = {**base, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(await client.post(path, json=request))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices].count("stop") == 1
    assert choices[-1]["finish_reason"] == "stop"
    if "chat" in path:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"].get("role") for c in choices].count("assistant") == 1
        assert "".join(c["delta"].get("content", "") for c in choices) == TEXT
        assert whole["choices"][0]["message"]["content"] == TEXT
    else:
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"] == TEXT


async def test_stream_without_usage_ends_with_done(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response)[-1] == "[DONE]"
    assert all("usage" not in event for event in events(response)[:-1])


async def test_choices_have_their_own_seeds(client: httpx.AsyncClient, service: FakeService) -> None:
    request = {**COMPLETION, "prompt": ["a", "b"], "n": 2, "seed": 2**64 - 1}
    body = (await client.post("/v1/completions", json=request)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    by_prompt = sorted((call.prompt, call.sampling.seed) for call in service.calls)
    assert by_prompt == [("a", 0), ("a", 2**64 - 1), ("b", 0), ("b", 2**64 - 1)]
    assert len(service.checked) == 4
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 20


async def test_streamed_choices_each_finish_once(client: httpx.AsyncClient, service: FakeService) -> None:
    *chunks, done = events(await client.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": True}))
    assert done == "[DONE]"
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == TEXT
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert service.open == 0


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "you"], [1, 2], [[1, 2], [3]]])
async def test_prompt_forms(client: httpx.AsyncClient, service: FakeService, prompt: Any) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "echo": True})
    assert response.status_code == 200
    texts = {"Hi": ["Hi"], "['Hi', 'you']": ["Hi", "you"], "[1, 2]": ["BC"], "[[1, 2], [3]]": ["BC", "D"]}[str(prompt)]
    assert [choice["text"] for choice in response.json()["choices"]] == [text + TEXT for text in texts]


async def test_echo_in_a_stream_comes_once(client: httpx.AsyncClient) -> None:
    *chunks, _ = events(await client.post("/v1/completions", json={**COMPLETION, "echo": True, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hi" + TEXT


async def test_completion_logprobs(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/completions", json={**COMPLETION, "logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(WORDS)
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["text_offset"] == [0, 5, 9, 9, 11]
    assert logprobs["top_logprobs"][0] == {"Hello": -0.5, "x": -9999.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client: httpx.AsyncClient, stream: bool) -> None:
    request = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await client.post("/v1/chat/completions", json=request)
    choices = [e["choices"][0] for e in events(response)[:-1]] if stream else response.json()["choices"]
    content = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == list(WORDS)
    assert content[0]["bytes"] == list(b"Hello")
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]


async def test_sampling_fields_arrive(client: httpx.AsyncClient, service: FakeService) -> None:
    request = {
        **CHAT, "max_completion_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7,
        "stop": "END", "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"3": 1, "4": -2.5}, "user": "me",
        "something_new": {"a": 1},
    }  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=request)).status_code == 200
    sampling = service.calls[0].sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.seed) == (4, 2, 7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("END",), (5,), True)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.5, -0.5)
    assert sampling.logit_bias == {3: 1, 4: -2.5}


async def test_content_parts_and_roles(client: httpx.AsyncClient, service: FakeService) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert [(m.role, m.content) for m in service.calls[0].messages or ()] == [
        ("developer", "be brief"),
        ("user", "a\nb"),
    ]


async def test_timeout_header(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout-s": "2.5"})
    assert service.calls[0].timeout_s == 2.5
    for bad in ("0", "-1", "nan", "inf", "soon"):
        response = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout-s": bad})
        assert response.status_code == 400


async def test_models_status_and_health(client: httpx.AsyncClient, service: FakeService) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL.model_id]
    assert (await client.get(f"/v1/models/{MODEL.model_id}")).json() == listed["data"][0]
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    status = (await client.get("/v1/status")).json()
    assert status["replicas"][0]["load"]["headroom"] == 146
    assert status["replicas"][1]["silent"] is True
    assert (status["ingresses_known"], status["scaling"]["target"]) == (2, 2)
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200
    service.is_ready = False
    unready = await client.get("/readyz")
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    assert (await client.get("/livez")).status_code == 200


async def test_official_client(service: FakeService) -> None:
    async with (
        client_of(service) as http,
        openai.AsyncOpenAI(api_key="none", base_url="http://orca/v1", http_client=http, max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == TEXT
        assert chat.usage is not None
        assert chat.usage.total_tokens == 8
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage == chat.usage
        completion = await client.completions.create(**COMPLETION, n=2, logprobs=1)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert [model.id async for model in client.models.list()] == [MODEL.model_id]
        assert (await client.models.retrieve(MODEL.model_id)).id == MODEL.model_id
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**CHAT, "messages": []})
        assert caught.value.param == "messages"
        service.error, service.fail_after = UnavailableError("the replica was lost"), 2
        with pytest.raises(openai.APIError, match="the replica was lost"):
            [c async for c in await client.chat.completions.create(**CHAT, stream=True)]


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/v1/completions", "/nowhere"])
async def test_where_the_server_names_requests_the_application_does_not(path: str) -> None:
    """Two headers of one name read as one, with both ids in it."""
    transport = httpx.ASGITransport(build_app(FakeService(), server_names_requests=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for answer in (await client.get(path), await client.post(path, json={"prompt": "Hi"})):
            assert "x-request-id" not in answer.headers
            assert answer.headers["content-type"].startswith("application/json")
