"""What the OpenAI HTTP face says where the service fails: before the first token, in a stream, at its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orca_core.errors import (
    DeadlineExceededError,
    InvariantError,
    OverloadedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.deployment.fake_service import FakeService, wrapped
from tests.deployment.http_rig import CHAT, COMPLETION, client, client_of, events, service

__all__ = ["client", "service"]

ERRORS: list[tuple[Callable[[], Exception], int, str | None]] = [
    (lambda: OverloadedError("the line is full", 2.2), 429, "3"),
    (lambda: UnavailableError("draining"), 503, "1"),
    (lambda: DeadlineExceededError(5), 408, None),
    (lambda: RequestCancelledError("x"), 499, None),
    (UnauthenticatedError, 401, None),
    (lambda: InvariantError("secret state"), 500, None),
    (lambda: RuntimeError("secret prompt"), 500, None),
    (lambda: wrapped(UnavailableError("draining")), 503, "1"),
]


@pytest.mark.parametrize(("make", "status", "retry_after"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token(
    make: Callable[[], Exception], status: int, retry_after: str | None, stream: bool
) -> None:
    async with client_of(FakeService(error=make())) as client:
        response = await client.post(
            "/v1/completions", json={**COMPLETION, "stream": stream}, headers={"x-request-id": "id-9"}
        )
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text
    if status == 500:
        assert response.json()["error"]["message"] == "internal error, request id-9"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
async def test_broken_stream_ends_with_an_error_event(path: str, n: int) -> None:
    service = FakeService(error=UnavailableError("the replica was lost"), fail_after=2)
    base = CHAT if "chat" in path else COMPLETION
    async with client_of(service) as client:
        response = await client.post(path, json={**base, "stream": True, "n": n})
    assert response.status_code == 200
    *chunks, last = events(response)
    assert last["error"]["code"] == "unavailable"
    assert "[DONE]" not in response.text
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert service.open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_just_ends_is_an_error(stream: bool) -> None:
    async with client_of(FakeService(truncate=True)) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert "the stream ended early" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 503)
