"""The HTTP face through Ray Serve: what only a real server can show. The rest is in ``tests/deployment``."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

BODY: dict[str, Any] = {"model": "smollm2-135m-instruct", "prompt": "Once upon a time", "temperature": 0}


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.http_port}{path}"


def test_a_stream_and_a_whole_answer_agree(settled: Server) -> None:
    client = openai.OpenAI(base_url=url(settled, "/v1"), api_key="none", max_retries=0)
    whole = client.completions.create(**BODY, max_tokens=12)
    parts = list(client.completions.create(**BODY, max_tokens=12, stream=True))
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts if part.choices)
    reasons = [part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_a_stream_ends_with_done(settled: Server) -> None:
    with httpx.stream(
        "POST", url(settled, "/v1/completions"), json={**BODY, "max_tokens": 5, "stream": True}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all("choices" in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_a_client_that_leaves_a_stream_frees_its_slots(settled: Server) -> None:
    """Field case A3."""
    body = {**BODY, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url(settled, "/v1/completions"), json=body) as answer:
        next(answer.iter_lines())  # nothing is sent before there is a token: it runs


def test_a_client_that_leaves_a_whole_answer_frees_its_slots(settled: Server) -> None:
    """Field cases A5 and A6: plain handlers, too, notice that the client has gone."""
    body = {**BODY, "max_tokens": 900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url(settled, "/v1/completions"), json=body, timeout=1.0)


def test_readiness_and_bad_input(settled: Server) -> None:
    assert httpx.get(url(settled, "/livez")).status_code == 200
    assert httpx.get(url(settled, "/readyz")).status_code == 200
    for wrong in ({"prompt": ""}, {"max_tokens": 10_000}, {"logit_bias": {"999999999": 1}}, {"temperature": -1}):
        answer = httpx.post(url(settled, "/v1/completions"), json={**BODY, **wrong})
        assert answer.status_code == 400, wrong
        assert answer.json()["error"]["message"]
