"""A service that asks for keys and whose replicas follow demand. A service of its own, since it changes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from deployment.client import OrcaClient
from deployment.pb.orca.v1 import orca_pb2 as pb
from orca_core.errors import UnauthenticatedError
from tests.e2e.conftest import Server, start, stop

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]

KEY, OTHER = "sk-e2e-one", "sk-e2e-two"
CONFIG = """
grpc_options:
  grpc_servicer_functions:
    - deployment.grpc_api.add_orca_service
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
applications:
  - name: orca
    import_path: deployment.app:build
    route_prefix: /
    args:
      engine: {device: cpu, n_slots: 8192, max_model_len: 1024, max_batch_size: 4}
      replicas: {min: 1, max: 2, num_cpus: 1, load_report_interval_s: 0.25}
      autoscaling: {upscale_delay_s: 1, downscale_delay_s: 4, interval_s: 0.5}
      drain: {timeout_s: 5}
"""
SCALE_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    return file


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"ORCA_API_KEYS_FILE": str(keys)}
    running = start(tmp_path_factory.mktemp("scaling"), "throughput", environment, CONFIG)
    yield running
    assert stop(running) == 0


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_both_faces_ask_for_a_key(server: Server, keys: Path) -> None:
    """Field case J2."""
    url = f"http://127.0.0.1:{server.http_port}"
    body = {"prompt": "Hi", "max_tokens": 2}
    with pytest.raises(grpc.RpcError) as refused:
        list(server.stub.Generate(pb.GenerateRequest(prompt="Hi"), timeout=30))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with OrcaClient(server.target, "wrong") as client, pytest.raises(UnauthenticatedError):
        client.status()
    for path in ("/v1/models", "/v1/status"):
        assert httpx.get(url + path).status_code == 401
    assert httpx.post(f"{url}/v1/completions", json=body).json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{url}/readyz").status_code == httpx.get(f"{url}/livez").status_code == 200

    good = {"authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=good, timeout=60).status_code == 200
    with OrcaClient(server.target, KEY) as client:
        assert client.complete("Hi", max_new_tokens=2).token_ids

    new = keys.with_name("new")
    new.write_text(f"{OTHER}\n")
    new.rename(keys)
    wait_until("the old key is revoked", lambda: httpx.get(f"{url}/v1/models", headers=good).status_code == 401, 10)
    with OrcaClient(server.target, OTHER) as client:
        assert client.model().model_id == "smollm2-135m-instruct"
    new.write_text(f"{KEY}\n{OTHER}\n")
    new.rename(keys)
    wait_until("it is back", lambda: httpx.get(f"{url}/v1/models", headers=good).status_code == 200, 10)


def begin(server: Server, max_new_tokens: int) -> grpc.Call:
    """A stream that has been sent, whether its first token has come or not."""
    sampling = pb.Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)
    request = pb.GenerateRequest(prompt="Tell me a story", sampling=sampling)
    return server.stub.Generate(request, timeout=180, metadata=[("authorization", f"Bearer {KEY}")])


def test_replicas_follow_demand_and_no_stream_is_cut(server: Server) -> None:
    """Field cases F2 and F4."""
    with OrcaClient(server.target, KEY) as client:

        def replicas_that_run() -> set[str]:
            return {each.replica for each in client.status().replicas if each.load.running}

        (eldest,) = (each.replica for each in client.status().replicas)
        load = [begin(server, 900) for _ in range(12)]
        wait_until("a second replica", lambda: len(client.status().replicas) == 2, SCALE_TIMEOUT_S)
        scaling = client.status().scaling
        assert scaling is not None
        assert (scaling.target, scaling.last_change.partition(":")[0]) == (2, "1 -> 2 replicas")
        assert scaling.age_s < scaling.last_change_age_s < SCALE_TIMEOUT_S
        for stream in load:
            stream.cancel()
        wait_until("nothing runs", lambda: not replicas_that_run(), 20)

        elsewhere = begin(server, 900)
        wait_until("it runs", lambda: bool(replicas_that_run()), 20)
        if replicas_that_run() == {eldest}:
            other, elsewhere = elsewhere, begin(server, 900)
            wait_until("both run", lambda: len(replicas_that_run()) == 2, 20)
            other.cancel()
        # Serve lets the youngest go: the one on which the stream runs
        wait_until("one replica is let go", lambda: len(client.status().replicas) == 1, SCALE_TIMEOUT_S)
        assert client.status().replicas[0].replica == eldest
        messages = list(elsewhere)
        assert messages[-1].finish_reason == pb.LENGTH
        assert sum(len(message.token_ids) for message in messages) == 900
        assert messages[-1].replica != eldest

    said = next(Path(logs(server)).glob("controller_*.log")).read_text()
    assert "autoscaling Replica: 1 -> 2 replicas" in said
    assert "autoscaling Replica: 2 -> 1 replicas" in said


def logs(server: Server) -> str:
    (line,) = [line for line in server.log.read_text().splitlines() if line.startswith("logs: ")]
    return line.removeprefix("logs: ")
