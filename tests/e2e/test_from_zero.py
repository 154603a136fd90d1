"""A service that scales to zero, and comes back for whoever asks. Its own service; replicas have no model to load."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from deployment.client import OrcaClient
from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.paced_service import PATIENCE_S, REPLICA, Paced, paced_service, say, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paced]:
    args = (
        "engine: {device: cpu, n_slots: 4096, max_model_len: 1024, max_batch_size: 4}",
        "replicas: {min: 0, max: 2, num_cpus: 1, load_report_interval_s: 0.5}",
        "autoscaling: {upscale_delay_s: 1, downscale_delay_s: 4, interval_s: 0.5}",
        "ingress: {replicas: 2}",
        "drain: {timeout_s: 10}",
    )
    with paced_service(tmp_path_factory.mktemp("zero"), 5.0, *args) as running:
        yield running


def at_zero(service: Paced) -> bool:
    """Whether all ingresses are there and see no replica, and none is left."""
    said = service.status()
    return not said.replicas and said.ingresses_answered == 2 and not service.pids(REPLICA)


def test_to_zero_and_back(service: Paced) -> None:
    """Twice: whoever asks a service that sleeps waits for the start, on either face, and nobody is refused."""
    body = {"prompt": "Hello", "max_tokens": 25}
    started_s = []
    with OrcaClient(service.server.target) as client:
        for _ in range(2):
            wait_until("no replica is left", lambda: at_zero(service))
            scaling = client.status().scaling
            assert scaling is not None
            assert scaling.target == 0
            assert client.model().model_id
            assert httpx.get(f"{service.url}/readyz").status_code == 200
            began = time.monotonic()
            calls = [service.server.stub.Complete.future(ask(n), timeout=PATIENCE_S) for n in (20, 30, 40)]
            answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 25)
            assert [len(call.result().token_ids) for call in calls] == [20, 30, 40]
            started_s.append(time.monotonic() - began)
            wait_until("the change is told", lambda: last_change(client).startswith("0 -> 1 replicas"), 20)
    say("from_zero", started_s=started_s)


def ask(n: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="Hello", sampling=pb.Sampling(max_new_tokens=n, ignore_eos=True))


def last_change(client: OrcaClient) -> str:
    scaling = client.status().scaling
    return "" if scaling is None else scaling.last_change
