"""Whatever is killed, hangs or is replaced: every stream says what it would have said. ``ORCA_CHAOS=full``: longer.

Replicas whose engines have no model, so that every token is known beforehand, and many faults take little time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.paced_service import CONTROLLER, FULL, INGRESS, REPLICA, Paced, paced_service, say, wait_until
from tests.e2e.traffic import Got, Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(900 if FULL else 400)]

N_KILLS = 20 if FULL else 4
N_HANGS = 4 if FULL else 1
N_GRPC, N_HTTP = (56, 8) if FULL else (28, 4)
N_STREAMS = N_GRPC + N_HTTP
N_SHORT, N_KEPT = 16, 6
N_TOKENS = (100, 300) if FULL else (60, 180)
N_REPLICAS, N_INGRESSES = (4, 3) if FULL else (3, 2)
SILENCE_S = 4
RETRY_WITHIN_S = 60.0
"""A request whose ingress has died is served by another one in so many seconds, most of which are its own."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paced]:
    args = (
        "engine: {device: cpu, n_slots: 65536, max_model_len: 4096, max_batch_size: 32}",
        f"replicas: {{min: {N_REPLICAS}, max: {N_REPLICAS}, num_cpus: 1, load_report_interval_s: 0.5}}",
        f"failover: {{silence_s: {SILENCE_S}, max_resumes: 30}}",
        f"ingress: {{replicas: {N_INGRESSES}}}",
        "limits: {max_waiting_requests: 128}",
        "drain: {timeout_s: 60}",
        "model: {id: before}",
    )
    with paced_service(tmp_path_factory.mktemp("chaos"), 25.0, *args) as running:
        yield running


@pytest.fixture
def settled(service: Paced) -> Iterator[Paced]:
    """All replicas there and nothing on them, before the test and after it."""
    service.settle(N_REPLICAS)
    yield service
    service.settle(N_REPLICAS)


def traffic(service: Paced, **given: Any) -> Traffic:
    return Traffic(service.server, N_GRPC, N_HTTP, N_TOKENS, **given)


def test_replicas_that_are_killed(settled: Paced) -> None:
    """Field case F16."""
    before = settled.metric("orca_failovers_total")
    recovery_s = []
    with traffic(settled) as clients:
        clients.wait_for(N_STREAMS // 2)
        for _ in range(N_KILLS):
            # one may be gone when the next one dies, but never all: that is another case
            wait_until("replicas enough", lambda: len(settled.status().replicas) >= N_REPLICAS - 1)
            settled.signal_one(REPLICA, signal.SIGKILL)
            clients.wait_for(N_STREAMS // 4)
        recovery_s.append(settled.wait_for_replicas(N_REPLICAS))
    assert not clients.faults()
    assert clients.resumes > 0
    # what SSE does not tell its clients is counted too
    http = N_HTTP * N_KILLS
    wait_until(
        "every resume is counted",
        lambda: clients.resumes <= settled.metric("orca_failovers_total") - before <= clients.resumes + http,
    )
    most = max(got.resumes for got in clients.done)
    say("kills", kills=N_KILLS, streams=len(clients.done), resumes=clients.resumes, most=most, recovery_s=recovery_s)


def test_a_replica_that_hangs(settled: Paced) -> None:
    slowest = []
    with traffic(settled, seed=2) as clients:
        clients.wait_for(N_STREAMS // 2)
        for _ in range(N_HANGS):
            settled.wait_for_replicas(N_REPLICAS)
            n_before = len(clients.done)
            frozen = settled.signal_one(REPLICA, signal.SIGSTOP)
            try:
                # whatever was open has ended by then, also what was on the one that hangs
                clients.wait_for(2 * N_STREAMS)
            finally:
                os.kill(frozen, signal.SIGCONT)
            slowest.append(max(got.seconds for got in clients.done[n_before:]))
            settled.wait_for_replicas(N_REPLICAS)
            clients.wait_for(N_STREAMS // 2)
    assert not clients.faults()
    assert clients.resumes > 0
    say("hangs", hangs=N_HANGS, streams=len(clients.done), resumes=clients.resumes, slowest_s=slowest)


def test_an_ingress_that_is_killed(settled: Paced) -> None:
    """Its streams end with an error that asks to come back, and who comes back is served; the others notice nothing."""

    def lost_its_ingress(got: Got) -> bool:
        if got.face == "http":
            return got.error.startswith(("503", "RemoteProtocolError", "ReadError", "the stream ended early"))
        return got.error.startswith("UNAVAILABLE") or (got.error.startswith("CANCELLED") and "RST_STREAM" in got.error)

    with traffic(settled, may_break=lost_its_ingress, seed=3) as clients:
        clients.wait_for(N_STREAMS // 2)
        for _ in range(N_HANGS):
            wait_until("all ingresses", lambda: len(settled.pids(INGRESS)) == N_INGRESSES)
            settled.signal_one(INGRESS, signal.SIGKILL)
            clients.wait_for(N_STREAMS)
    assert not clients.faults()
    assert 0 < len({got.ask.seed for got in clients.broken}) < N_HANGS * N_STREAMS
    assert max(clients.recovered_s) < RETRY_WITHIN_S
    wait_until("all ingresses", lambda: len(settled.pids(INGRESS)) == N_INGRESSES)
    errors = sorted({got.error[:90] for got in clients.broken})
    say("ingress", broken=len(clients.broken), retried_in_s=max(clients.recovered_s), errors=errors)


def test_a_controller_that_is_killed(settled: Paced) -> None:
    """Field cases F10 and F11: traffic goes on without it, and the one that takes its place does its work."""
    (old,) = settled.pids(CONTROLLER)
    with traffic(settled, seed=4) as clients:
        clients.wait_for(N_STREAMS // 2)
        os.kill(old, signal.SIGKILL)
        back_s = wait_until("another controller", lambda: set(settled.pids(CONTROLLER)) not in ({old}, set()))
        clients.wait_for(2 * N_STREAMS)
        assert not clients.resumes, "nobody lost its replica"
        killed = settled.signal_one(REPLICA, signal.SIGKILL)
        replaced_s = wait_until("its place is taken", lambda: len(set(settled.pids(REPLICA)) - {killed}) == N_REPLICAS)
        settled.wait_for_replicas(N_REPLICAS)
    assert not clients.faults()
    say("controller", streams=len(clients.done), back_s=back_s, replaced_s=replaced_s, resumes=clients.resumes)


def test_a_new_version_under_load(settled: Paced) -> None:
    """Field case F6: every process is replaced, and no request fails, not even for a moment.

    Short ones over HTTP beside the long ones: each looks for an ingress anew, over a connection that is kept. And
    connections over which nothing has come since before the update.
    """
    old = set(settled.pids(REPLICA)) | set(settled.pids(INGRESS))
    short = Traffic(settled.server, 2, N_SHORT, (4, 40), seed=6)
    with kept_connections(settled) as ask_each, traffic(settled, seed=5) as clients, short:
        clients.wait_for(N_STREAMS // 2)
        began = time.monotonic()
        with settled.redeployed(model="model: {id: after}"):
            pass
        took_s = time.monotonic() - began
        wait_until("the old ones exit", lambda: not old & {*settled.pids(REPLICA), *settled.pids(INGRESS)})
        clients.wait_for(N_STREAMS)
        assert ask_each() == [200] * N_KEPT
    assert not clients.faults() + short.faults()
    assert served(settled) == {"after"}
    n_short = len(short.done)
    say("update", streams=len(clients.done), short=n_short, took_s=took_s, resumes=clients.resumes)


def test_a_new_version_after_another_controller(settled: Paced) -> None:
    """Field case F10: whoever listened to the one that was killed hears of the new version from the next one."""
    (killed,) = settled.pids(CONTROLLER)
    os.kill(killed, signal.SIGKILL)
    wait_until("another controller", lambda: set(settled.pids(CONTROLLER)) not in ({killed}, set()))
    old = set(settled.pids(REPLICA)) | set(settled.pids(INGRESS))
    with traffic(settled, seed=7) as clients:
        clients.wait_for(N_STREAMS // 2)
        with settled.redeployed(model="model: {id: again}"):
            pass
        wait_until("the old ones exit", lambda: not old & {*settled.pids(REPLICA), *settled.pids(INGRESS)})
        clients.wait_for(N_STREAMS // 2)
    assert not clients.faults()
    assert served(settled) == {"again"}


def served(service: Paced) -> set[str]:
    """Names of the model that the ingresses tell, over connections of their own, on either face."""
    url, told = f"{service.url}/v1/models", set()
    for _ in range(3 * N_INGRESSES):
        told.add(service.server.stub.GetModel(pb.GetModelRequest(), timeout=20).id)
        told |= {model["id"] for model in httpx.get(url, timeout=20).json()["data"]}
    return told


@contextmanager
def kept_connections(service: Paced) -> Iterator[Callable[[], list[int]]]:
    """HTTP connections that have had one answer each; calling what is given gets another over each of them."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "seed": 1}
    with ExitStack() as stack:
        limits = httpx.Limits(keepalive_expiry=None)
        clients = [
            stack.enter_context(httpx.Client(base_url=service.url, timeout=60, limits=limits)) for _ in range(N_KEPT)
        ]

        def ask_each() -> list[int]:
            return [client.post("/v1/completions", json=body).status_code for client in clients]

        assert ask_each() == [200] * N_KEPT
        yield ask_each
