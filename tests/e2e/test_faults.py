"""Processes of the service that freeze or die, as the clients see it. A service of its own, since it breaks it."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import grpc
import httpx
import pytest

from deployment.client import OrcaClient
from deployment.pb.orca.v1 import orca_pb2 as pb
from orca_core.errors import UnavailableError
from tests.e2e.conftest import MARK, Server, left_over, marked_processes, start, stop
from tests.e2e.paced_service import say

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
LONG = pb.Sampling(max_new_tokens=500, ignore_eos=True)
RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    mark = uuid.uuid4().hex
    running = start(tmp_path_factory.mktemp("faults"), "throughput", {MARK: mark})
    yield running, mark
    assert stop(running) == 0
    assert left_over(mark) == {}


def process_of(mark: str, deployment: str) -> int:
    """Id of one actor of a deployment."""
    return next(pid for pid, command in marked_processes(mark).items() if f":{deployment}" in command)


def haproxies(mark: str) -> list[int]:
    """Ids of the HAProxy that serves and of those that it replaced."""
    return [pid for pid, command in marked_processes(mark).items() if re.match(r"\S*haproxy -dS ", command)]


def n_arrived(server: Server) -> int:
    """Requests that run, or wait in the ingress."""
    status = server.stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    return int(status.waiting_requests) + sum(replica.load.running for replica in status.replicas)


def test_many_calls_share_a_connection(marked: tuple[Server, str]) -> None:
    """HTTP/2 bounds the calls of a connection; beyond the bound a call waits, and nobody tells its client."""
    server, _ = marked
    streams = [server.stub.Generate(pb.GenerateRequest(prompt="x", sampling=LONG), timeout=120) for _ in range(150)]
    try:
        deadline = time.monotonic() + RECOVERY_S
        while n_arrived(server) < len(streams):
            assert time.monotonic() < deadline, f"some never arrived: {n_arrived(server)} have"
    finally:
        for stream in streams:
            stream.cancel()
    server.settle()


def test_a_frozen_replica_hides_no_other(marked: tuple[Server, str]) -> None:
    server, mark = marked
    replica = process_of(mark, "Replica")
    os.kill(replica, signal.SIGSTOP)
    try:
        time.sleep(0.6)  # the answers of before are not good enough for a probe any more
        assert httpx.get(f"http://127.0.0.1:{server.http_port}/readyz", timeout=20).status_code == 200
        assert len(server.loads()) == 1
    finally:
        os.kill(replica, signal.SIGCONT)
    server.settle()


def test_an_ingress_that_dies(marked: tuple[Server, str]) -> None:
    """Streams end with an error that asks to come back; so do new requests, until another ingress serves."""
    server, mark = marked
    with OrcaClient(server.target) as client:
        stream = client.generate("Once upon a time", max_new_tokens=500, ignore_eos=True)
        next(stream)
        os.kill(process_of(mark, "Ingress"), signal.SIGKILL)
        with pytest.raises(UnavailableError):
            list(stream)
    deadline = time.monotonic() + RECOVERY_S
    statuses = set()
    while time.monotonic() < deadline:
        answer = None
        with suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{server.http_port}/readyz", timeout=20)
        if answer is not None and answer.status_code == 200:
            break
        if answer is not None:
            statuses.add((answer.status_code, answer.headers["content-type"]))
        with suppress(grpc.RpcError):
            server.stub.Complete(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_new_tokens=1)), timeout=20)
        time.sleep(0.1)
    else:
        pytest.fail("no ingress took the place of the one that died")
    assert statuses <= {(503, "application/json")}
    server.settle()


def test_haproxy_that_dies(marked: tuple[Server, str]) -> None:
    """Nobody is told that the service, its models or its paths do not exist: refused, to come back later, or served."""
    server, mark = marked
    with OrcaClient(server.target) as client:
        stream = client.generate("Once upon a time", max_new_tokens=500, ignore_eos=True)
        next(stream)
        for pid in haproxies(mark):
            os.kill(pid, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(UnavailableError):
            list(stream)
    answers: set[tuple[object, ...]] = set()
    deadline = died + RECOVERY_S
    served = {"http": False, "grpc": False}
    while not all(served.values()):
        assert time.monotonic() < deadline, f"no HAProxy took the place of the one that died: {answers}"
        with suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{server.http_port}/v1/completions"
            answer = httpx.post(url, json={"prompt": "x", "max_tokens": 1}, timeout=20)
            served["http"] |= answer.status_code == 200
            if answer.status_code != 200:
                answers.add((answer.status_code, answer.json()["error"]["code"], "retry-after" in answer.headers))
        try:
            server.stub.Complete(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_new_tokens=1)), timeout=20)
            served["grpc"] = True
        except grpc.RpcError as error:
            answers.add((error.code(),))
        time.sleep(0.1)
    say("haproxy", outage_s=time.monotonic() - died, answers=[str(answer) for answer in answers])
    assert answers <= {(503, "unavailable", True), (grpc.StatusCode.UNAVAILABLE,)}
    server.settle()
