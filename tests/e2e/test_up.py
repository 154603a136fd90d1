"""The life of ``orca-serve up``: what a supervisor sees of it. Its own service, since it ends it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from deployment.haproxy import free_range
from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import MARK, STOP_TIMEOUT_S, left_over, marked_processes, start

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    """An open stream ends as if nothing had happened, new requests are refused, exit 0, no process, no port."""
    mark = uuid.uuid4().hex
    server = start(tmp_path, "throughput", {MARK: mark})
    try:
        assert len(marked_processes(mark)) > 3
        sampling = pb.Sampling(max_new_tokens=120, ignore_eos=True)
        stream = server.stub.Generate(pb.GenerateRequest(prompt="Tell me a story", sampling=sampling), timeout=60)
        messages = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"http://127.0.0.1:{server.http_port}/readyz").status_code == 200:
            messages.append(next(stream))
        with pytest.raises(grpc.RpcError) as refused:
            server.stub.Complete(pb.GenerateRequest(prompt="late"), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        late = httpx.post(f"http://127.0.0.1:{server.http_port}/v1/completions", json={"prompt": "late"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
        assert int(late.headers["retry-after"]) > 0
        messages += stream
        assert sum(len(message.token_ids) for message in messages) == 120
        assert messages[-1].finish_reason == pb.LENGTH
        assert server.process.wait(STOP_TIMEOUT_S) == 0
    finally:
        server.channel.close()
        with server.process:
            server.process.kill()
    assert left_over(mark) == {}
    for port in (server.http_port, server.grpc_port):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["starting Ray (", "starting Ray Serve (", "loading model"])
def test_a_signal_while_it_starts_ends_it_at_once(step: str, number: signal.Signals, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    http_port, grpc_port = free_range(2)
    command = [str(Path(sys.executable).with_name("orca-serve")), "up"]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    environment = os.environ | {MARK: mark}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said: list[str] = []
        while not said or step not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], f"it ended by itself: {said}"
        process.send_signal(number)
        rest = process.stderr.read().splitlines()
        assert process.wait(STOP_TIMEOUT_S) == 128 + number
    steps = [line for line in rest if re.fullmatch(r"(starting|loading) .* \(\d+ s\)", line)]
    assert [line for line in rest if line not in steps] == ["orca-serve: stopped while starting"]
    assert left_over(mark) == {}


def test_sigkill_frees_the_ports(tmp_path: Path) -> None:
    """Nobody is left to clean up: Ray's processes notice it by themselves, and HAProxy must end with them."""
    mark = uuid.uuid4().hex
    server = start(tmp_path, "throughput", {MARK: mark})
    server.channel.close()
    with server.process:
        server.process.kill()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    try:
        while left := [line for line in marked_processes(mark).values() if "haproxy" in line or "Serve" in line]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.2)
    finally:  # two agents of Ray's, which listen to no client, take minutes to notice
        while left := marked_processes(mark):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
    for port in (server.http_port, server.grpc_port):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
