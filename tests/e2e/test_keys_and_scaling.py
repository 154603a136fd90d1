"""A service that asks for keys and whose replicas follow demand. A service of its own, since it changes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from deployment.client import ClientChunk, OrcaClient
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


def test_replicas_follow_demand_and_no_stream_is_cut(server: Server) -> None:
    """Field cases F2 and F4."""
    with OrcaClient(server.target, KEY) as client, ExitStack() as streams:

        def n_replicas() -> int:
            return len(client.status().replicas)

        assert n_replicas() == 1
        load = [client.generate("Tell me a story", max_new_tokens=900, ignore_eos=True) for _ in range(12)]
        for stream in load:
            streams.callback(stream.close)
        first = [next(stream) for stream in load[:4]]
        assert {chunk.replica for chunk in first} == {client.status().replicas[0].replica}
        wait_until("a second replica", lambda: n_replicas() == 2, SCALE_TIMEOUT_S)
        streams.close()
        wait_until("nothing runs", lambda: not any(r.load.running for r in client.status().replicas), 20)

        stream, chunk = stream_on_another(client, {each.replica for each in first})
        wait_until("one replica is let go", lambda: n_replicas() == 1, SCALE_TIMEOUT_S)
        rest = list(stream)  # Serve lets the youngest go: the one it runs on
        assert rest[-1].finish_reason is not None
        assert len(chunk.token_ids) + sum(len(each.token_ids) for each in rest) == 900

    said = next(Path(logs(server)).glob("controller_*.log")).read_text()
    assert "autoscaling Replica: 1 -> 2 replicas" in said
    assert "autoscaling Replica: 2 -> 1 replicas" in said


def stream_on_another(client: OrcaClient, replicas: set[str]) -> tuple[Generator[ClientChunk, None, None], ClientChunk]:
    """A long stream, with its first chunk, that runs on none of these replicas."""
    with ExitStack() as others:
        while True:
            stream = client.generate("Once upon a time", max_new_tokens=900, ignore_eos=True)
            chunk = next(stream)
            if chunk.replica not in replicas:
                return stream, chunk
            others.callback(stream.close)


def logs(server: Server) -> str:
    (line,) = [line for line in server.log.read_text().splitlines() if line.startswith("logs: ")]
    return line.removeprefix("logs: ")
