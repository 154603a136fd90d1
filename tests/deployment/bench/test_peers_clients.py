"""Runners that speak to a server: when requests are sent, and what is read from the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from deployment.bench.peers.clients import Stream, drive
from deployment.bench.peers.openai import ask_server, body_of, read_stream
from deployment.bench.peers.service import address_in, service_document
from deployment.serve_file import serve_file

USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
TOKEN = {"choices": [{"text": "a"}]}


async def lines_of(*events: Any) -> AsyncIterator[bytes]:
    """Server-sent events."""
    for event in events:
        yield b": comment"
        yield b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\r"
        yield b""


def read(*events: Any) -> Stream:
    """What is read from events that come a second apart."""
    ticks = iter(range(1, 100))
    return asyncio.run(read_stream(lines_of(*events), lambda: next(ticks)))


def test_a_stream_has_the_times_of_its_tokens_and_the_servers_count() -> None:
    assert read(TOKEN, TOKEN, USAGE, b"[DONE]") == Stream(1, 2, 3)
    assert read(TOKEN, TOKEN | {"usage": None}, TOKEN | USAGE | TOKEN, b"[DONE]") == Stream(1, 3, 3)


@pytest.mark.parametrize(
    ("events", "message"),
    [((TOKEN, USAGE), "ended early"), ((TOKEN, b"[DONE]"), "ended early"), ((TOKEN, {"error": "full"}), "said full")],
)
def test_a_stream_that_is_cut_off_or_failed_is_no_result(events: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*events)


def test_a_request_is_greedy_and_has_what_its_server_needs() -> None:
    body = body_of({"prompt": [1, 2], "new_tokens": 7, "at_s": 0.0}, {"ignore_eos": True})
    assert body == {
        "prompt": [1, 2], "max_tokens": 7, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }  # fmt: skip


async def _serve(response: bytes, ask: Any) -> tuple[Any, list[bytes]]:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split(b":")[1])
        seen.append(await reader.readexactly(length))
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        return await ask(server.sockets[0].getsockname()[1]), seen


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_server_is_read_however_its_answer_is_cut(is_chunked: bool) -> None:
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in (TOKEN, USAGE)) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if is_chunked:  # in the middle of events
        pieces = [text[start : start + 9] for start in range(0, len(text), 9)]
        body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        response = head + b"Transfer-Encoding: chunked\r\n\r\n" + body
    else:
        response = head + b"\r\n" + text
    asks = [{"at_s": 0.0, "prompt": [5], "new_tokens": 3}]
    answer, seen = asyncio.run(_serve(response, lambda port: ask_server(port, {"model": "m"}, asks)))
    (said,) = answer["requests"]
    assert said["tokens"] == 3
    assert 0 <= said["first_s"] <= said["last_s"]
    assert json.loads(seen[0])["model"] == "m"


def test_a_refusal_is_a_failure() -> None:
    response = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nno such"
    asks = [{"at_s": 0.0, "prompt": [5], "new_tokens": 3}]
    with pytest.raises(ValueError, match="400 Bad Request: no such"):
        asyncio.run(_serve(response, lambda port: ask_server(port, {}, asks)))


def test_requests_are_sent_when_they_arrive_and_answered_in_their_order() -> None:
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def send(request: Mapping[str, Any]) -> Stream:
        return Stream(100.0 + request["at_s"], 109.0, request["tokens"])

    asks = [{"at_s": 7.0, "tokens": 1}, {"at_s": 0.0, "tokens": 2}]
    answer = asyncio.run(drive(asks, send, lambda: 100.0, sleep))
    assert waited == [7.0, 0.0]
    assert answer == {
        "requests": [{"first_s": 7.0, "last_s": 9.0, "tokens": 1}, {"first_s": 0.0, "last_s": 9.0, "tokens": 2}]
    }


@pytest.mark.parametrize(
    ("line", "address"),
    [("ready grpc=127.0.0.1:9 http=http://127.0.0.1:8 model=m replicas=1\n", "127.0.0.1:9"), ("starting\n", None),
     ("loading grpc=3\n", None), ("\n", None)],
)  # fmt: skip
def test_the_service_says_where_it_is(line: str, address: str | None) -> None:
    assert address_in(line) == address


def test_the_service_is_started_with_a_sound_config() -> None:
    document = service_document({"model": {"source": "m"}, "replicas": {"min": 1, "max": 1, "num_cpus": 2}})
    app = serve_file(document).app
    assert (app.model.source, app.replicas.max, app.replicas.num_cpus) == ("m", 1, 2)
