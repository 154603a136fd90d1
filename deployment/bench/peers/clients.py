"""What runners share that speak to a server: they send requests when these arrive, and end the server with them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final

_END_S: Final = 45.0


@dataclass(slots=True)
class Stream:
    """Seconds on the monotonic clock of its first token and its last, and how many there were."""

    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0


async def drive(
    requests: Sequence[Mapping[str, Any]],
    send: Callable[[Mapping[str, Any]], Awaitable[Stream]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> dict[str, Any]:
    """Call ``send`` for each request when it arrives; the answer of a runner."""
    started = clock()

    async def later(request: Mapping[str, Any]) -> Stream:
        await sleep(max(0.0, started + request["at_s"] - clock()))
        return await send(request)

    streams = await asyncio.gather(*(later(request) for request in requests))
    return {
        "requests": [
            {"first_s": each.first_at - started, "last_s": each.last_at - started, "tokens": each.tokens}
            for each in streams
        ]
    }


@contextmanager
def server(argv: Sequence[str], stdout: int | IO[str] | None) -> Iterator[subprocess.Popen[str]]:
    """A server while the block runs; it is asked to end then (SIGTERM), and made to after a while."""
    process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=stdout, text=True)  # noqa: S603 - a file's
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
