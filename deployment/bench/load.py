"""``python -m deployment.bench.load``: gRPC clients in a process of their own, as cheap as Python allows.

What arrives is kept as bytes and read after the clock has stopped, so that the clients cost the machine the least.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from deployment.bench.helpers import answer_lines
from deployment.bench.wire import GENERATE, count_tokens, prompt_of, request_bytes


@dataclass(slots=True)
class _Stream:
    """Seconds on the monotonic clock; ``messages`` as they came."""

    sent_at: float = 0.0
    first_at: float = 0.0
    ended_at: float = 0.0
    messages: list[bytes] = field(default_factory=list)


def answer(address: str, application: str, streams: int, tokens: int, repeat: int = 1) -> dict[str, Any]:
    """``streams`` requests of ``tokens`` tokens at once, ``repeat`` times one after the other, over one connection.

    ``elapsed_s``: from the first request to the end of the last stream, over all repetitions. ``first_token_s``: of
    every stream. ``cpu_s``: what this process used meanwhile.
    """
    return asyncio.run(_run(address, application, streams, tokens, repeat))


async def _run(address: str, application: str, n_streams: int, n_tokens: int, repeat: int) -> dict[str, Any]:
    metadata = (("application", application),)
    done: list[_Stream] = []
    elapsed_s = cpu_s = 0.0
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        generate = channel.unary_stream(GENERATE)
        for _ in range(repeat):
            requests = [request_bytes(prompt_of(index), n_tokens) for index in range(n_streams)]
            started, cpu = time.monotonic(), time.process_time()
            done += await asyncio.gather(*(_read(generate(request, metadata=metadata)) for request in requests))
            elapsed_s += time.monotonic() - started
            cpu_s += time.process_time() - cpu
    return {
        "elapsed_s": elapsed_s,
        "cpu_s": cpu_s,
        "tokens": sum(count_tokens(stream.messages) for stream in done),
        "messages": sum(len(stream.messages) for stream in done),
        "first_token_s": [stream.first_at - stream.sent_at for stream in done],
    }


async def _read(call: Any) -> _Stream:
    stream = _Stream(sent_at=time.monotonic())
    keep = stream.messages.append
    async for message in call:
        if not stream.messages:
            stream.first_at = time.monotonic()
        keep(message)
    stream.ended_at = time.monotonic()
    return stream


if __name__ == "__main__":
    answer_lines(answer)
