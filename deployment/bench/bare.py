"""``python -m deployment.bench.bare``: a ``grpc.aio`` server with nothing behind it, as fast as Python can be.

It streams the messages that the service would, made one by one from text and token id, as fast as they are taken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio

from deployment.bench.helpers import answer_lines
from deployment.bench.wire import generate_handler, response_of


async def _generate(request: Any, _context: Any) -> AsyncGenerator[Any, None]:
    n_tokens = request.sampling.max_new_tokens
    for index in range(n_tokens):
        yield response_of(index, n_tokens)


async def _serve(tell_port: Callable[[int], object]) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((generate_handler(_generate),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell_port(port)
    await server.wait_for_termination()


def main() -> None:
    """Serve until nobody asks any more; the answer to every question is the port."""
    known = threading.Event()
    ports: list[int] = []

    def tell(port: int) -> None:
        ports.append(port)
        known.set()

    threading.Thread(target=lambda: asyncio.run(_serve(tell)), daemon=True).start()
    known.wait()
    answer_lines(lambda: {"port": ports[0]})


if __name__ == "__main__":
    main()
