"""``python -m deployment.bench.peers.openai SETTINGS``: the runner of any server that speaks OpenAI's HTTP API.

``SETTINGS``: JSON, ``{"command": [...], "port": 8100, "health": "/health", "body": {...}}``. Requests are streamed from
``/v1/completions`` with token ids as prompts, greedy; ``body`` is added to each of them. What asks a server to go on
after the end-of-sequence token, and what to call the model, is its own affair and stands there.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from deployment.bench.helpers import answer_lines
from deployment.bench.peers.clients import Stream, drive, server

_HOST: Final = "127.0.0.1"
_START_S: Final = 900.0
_POLL_S: Final = 0.5


def body_of(request: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a completion request, ``extra`` included."""
    return {
        "prompt": request["prompt"], "max_tokens": request["new_tokens"], "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **extra,
    }  # fmt: skip


async def post(port: int, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The lines of the body of an answer to ``/v1/completions``. Raises ``ValueError`` for another status than 200."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(_HOST, port, limit=1 << 24)
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        status = await reader.readline()
        headers = [line async for line in _until_empty(reader)]
        chunked = any(line.lower().replace(b" ", b"").startswith(b"transfer-encoding:chunked") for line in headers)
        if status.split()[1:2] != [b"200"]:
            raise ValueError(f"{status.decode().strip()}: {(await reader.read(1000)).decode(errors='replace')}")
        pending = b""
        async for piece in _chunks(reader) if chunked else reader:
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                yield line
    finally:
        writer.close()


async def _until_empty(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := (await reader.readline()).strip():
        yield line


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """RFC 9112, 7.1."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def read_stream(lines: AsyncIterator[bytes], clock: Callable[[], float] = time.monotonic) -> Stream:
    """Server-sent events to ``[DONE]``: when they came, and how many tokens the server says there were.

    Raises ``ValueError`` for an error event, and where the end or the usage is missing.
    """
    stream, is_done = Stream(), False
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        said = line[5:].strip()
        if said == b"[DONE]":
            is_done = True
            break
        now, event = clock(), json.loads(said)
        if "error" in event:
            raise ValueError(f"the server said {event['error']}")
        if event.get("choices"):
            stream.first_at, stream.last_at = stream.first_at or now, now
        if event.get("usage"):
            stream.tokens = int(event["usage"]["completion_tokens"])
    if not is_done or not stream.tokens:
        raise ValueError("a stream ended early")
    return stream


async def ask_server(port: int, extra: Mapping[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Stream all requests, each over a connection of its own; the answer of a runner."""
    return await drive(requests, lambda request: read_stream(post(port, body_of(request, extra))))


def wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Until ``url`` answers 200. Exits where the server ends before, or after a quarter of an hour."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - of our own making
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    sys.exit("the server did not become ready")


def main() -> None:
    """Start the server, answer until nobody asks any more, end it."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    port, extra = int(settings["port"]), settings.get("body", {})
    # what it says belongs to stderr: our own output is answers
    with server(settings["command"], sys.stderr.fileno()) as process:
        wait_ready(f"http://{_HOST}:{port}{settings.get('health', '/health')}", process)
        answer_lines(lambda requests: asyncio.run(ask_server(port, extra, requests)))


if __name__ == "__main__":
    main()
