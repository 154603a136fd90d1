"""The real gRPC face over a fake service, on a free port of loopback, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from deployment.grpc_api import GrpcMethods, add_orca_service
from tests.deployment.fake_service import FakeService


class FakeIngress(FakeService, GrpcMethods):
    """What the ingress is to gRPC. ``metadata``: what each call to ``Generate`` or ``Complete`` brought."""


@contextmanager
def serving(service: FakeIngress) -> Iterator[str]:
    """Serve it; yields HOST:PORT."""
    address: list[str] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        server: Any = grpc.aio.server()
        add_orca_service(service, server)
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="test-grpc-server")
    thread.start()
    try:
        started.wait()
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
