"""``python -m deployment.bench.peers.service CONFIG``: the runner of the whole service, through gRPC and Ray Serve.

``CONFIG``: JSON, the ``AppConfig`` of the application that ``orca-serve up`` starts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc.aio

from deployment.bench.helpers import answer_lines
from deployment.bench.peers.clients import Stream, drive, server
from deployment.bench.wire import GENERATE, count_tokens, request_bytes
from deployment.haproxy import free_range
from deployment.serve_file import load_serve_file

_UP: Final = "import sys; from deployment.cli.main import main; sys.exit(main())"
_PORTS: Final = 2


def service_document(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The Serve config to start: the packaged one for a CPU, with these arguments."""
    document: dict[str, Any] = load_serve_file("local-cpu").document
    document["applications"][0]["args"] = dict(arguments)
    return document


def address_in(line: str) -> str | None:
    """The gRPC address in the line that says the service is ready; ``None`` in another line."""
    words = line.split()
    found = [word.removeprefix("grpc=") for word in words if word.startswith("grpc=")]
    return found[0] if words[:1] == ["ready"] and found else None


async def ask_service(address: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Stream all requests over one connection; the answer of a runner."""
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        generate = channel.unary_stream(GENERATE)

        async def send(request: Mapping[str, Any]) -> Stream:
            stream, messages = Stream(), list[bytes]()
            async for message in generate(request_bytes(request["prompt"], request["new_tokens"])):
                stream.last_at = time.monotonic()
                stream.first_at = stream.first_at or stream.last_at
                messages.append(message)
            stream.tokens = count_tokens(messages)
            return stream

        return await drive(requests, send)


def main() -> None:
    """Start the service, answer until nobody asks any more, end it."""
    http_port, grpc_port = free_range(_PORTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "service.yaml"
        path.write_text(json.dumps(service_document(json.loads(sys.argv[1]))))
        argv = [
            sys.executable,
            "-c",
            _UP,
            "up",
            str(path),
            "--http-port",
            str(http_port),
            "--grpc-port",
            str(grpc_port),
        ]
        with server(argv, subprocess.PIPE) as process:
            assert process.stdout is not None  # noqa: S101 - a pipe
            found = (address_in(line) for line in process.stdout)
            address = next((each for each in found if each is not None), None)
            if address is None:
                sys.exit("orca-serve up did not become ready")
            answer_lines(lambda requests: asyncio.run(ask_service(address, requests)))


if __name__ == "__main__":
    main()
