"""How an HTTP request comes in: its body within bounds, and its client watched for leaving. On bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_core.errors import PayloadTooLargeError

REQUEST_ID_HEADER: Final = "x-request-id"
_RECEIVE_PAUSE_S: Final = 0.05

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await ``work``; where the client leaves first, cancel it, wait for its end and return ``None``."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() or not watcher.result():
            return await task
        return None
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> bool:
    """True once the client has left; False where the server can't tell."""
    try:
        while (await receive())["type"] != "http.disconnect":  # noqa: ASYNC110
            await asyncio.sleep(_RECEIVE_PAUSE_S)  # a server may repeat the request's end for ever
    except Exception:
        return False
    return True


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be longer than ``limit`` bytes: before it is read if it says so."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 19 and int(declared) > limit:
        raise PayloadTooLargeError(int(declared), limit)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise PayloadTooLargeError(len(body), limit)
    return bytes(body)


class WithoutRequestId:
    """ASGI: answers of an application without its ``x-request-id``, for a server that adds the same one by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, as ASGI says."""

        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = REQUEST_ID_HEADER.encode()
                kept = [each for each in message.get("headers", ()) if each[0].lower() != name]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, send_without)
