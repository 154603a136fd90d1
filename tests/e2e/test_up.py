"""The life of ``orca-serve up``: what a supervisor sees of it. Its own service, since it ends it."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.replica import LEASE_S
from tests.e2e.conftest import CONFIG, MARK, STOP_TIMEOUT_S, marked_processes, start, stop

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
    assert marked_processes(mark) == {}
    for port in (server.http_port, server.grpc_port):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_idle_service_stops_before_a_lease_is_over(tmp_path: Path) -> None:
    """Two ingresses, of which one never saw a request: replicas that waited for their links took LEASE_S more."""
    config = CONFIG.replace("drain: {timeout_s: 90}", "drain: {timeout_s: 90}\n      ingress: {replicas: 2}")
    server = start(tmp_path, "proxy", config_text=config)
    server.stub.Complete(pb.GenerateRequest(prompt="Hi", sampling=pb.Sampling(max_new_tokens=2)), timeout=60)
    began = time.monotonic()
    assert stop(server) == 0
    assert time.monotonic() - began < LEASE_S


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
        for pid in marked_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for port in (server.http_port, server.grpc_port):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
