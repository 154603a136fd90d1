"""How an HTTP request comes in: its body within bounds, and its client watched for leaving. On bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from orca_core.errors import PayloadTooLargeError

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
