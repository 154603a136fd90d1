"""A client that goes away cancels its work, streaming or not; driven on the bare ASGI interface."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deployment.http_api import build_app
from tests.deployment.fake_service import FakeService


class Connection:
    """One HTTP request as an ASGI server would make it; ``left`` disconnects."""

    def __init__(self, service: FakeService, body: dict[str, Any], broken: bool = False) -> None:
        self.broken = broken
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.wrote = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "scheme": "http", "headers": [], "server": ("orca", 80), "client": ("1.2.3.4", 5),
        }  # fmt: skip
        self.task = asyncio.create_task(build_app(service)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.broken:
            raise OSError
        self.sent.append(message)
        if message["type"] == "http.response.body" and message.get("body"):
            self.wrote.set()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(stream: bool, n: int) -> None:
    service = FakeService(gate=asyncio.Semaphore(0))
    connection = Connection(service, {"prompt": "Hi", "stream": stream, "n": n})
    await service.started.wait()
    connection.left.set()
    await connection.task
    assert service.open == 0
    assert service.cancelled == len(service.calls)
    assert connection.sent[0]["status"] == 499


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_while_no_token_comes(n: int) -> None:
    service = FakeService(gate=asyncio.Semaphore(n))
    connection = Connection(service, {"prompt": "Hi", "stream": True, "n": n})
    await connection.wrote.wait()
    connection.left.set()
    await connection.task
    assert service.open == 0
    assert service.cancelled == n
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in connection.sent)


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_whole_answer_halfway(n: int) -> None:
    service = FakeService(gate=asyncio.Semaphore(2 * n))
    connection = Connection(service, {"prompt": "Hi", "n": n})
    while not service.gate.locked():  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0)
    connection.left.set()
    await connection.task
    assert (service.open, service.cancelled) == (0, n)


async def test_a_server_that_cancels_the_task_closes_the_stream() -> None:
    service = FakeService(gate=asyncio.Semaphore(1))
    connection = Connection(service, {"prompt": "Hi", "stream": True})
    await connection.wrote.wait()
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert (service.open, service.cancelled) == (0, 1)


async def test_a_reader_that_vanishes_shows_as_oserror() -> None:
    service = FakeService()
    connection = Connection(service, {"prompt": "Hi", "stream": True}, broken=True)
    await connection.task
    assert (service.open, service.cancelled) == (0, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_leaving_in_the_midst_of_the_body_is_no_error_of_ours(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[dict[str, Any]] = []
    pieces = [
        {"type": "http.request", "body": b'{"prompt": "He', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    service = FakeService()
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [], "server": ("orca", 80), "client": ("1.2.3.4", 5),
    }  # fmt: skip
    await build_app(service)(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not service.calls
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
