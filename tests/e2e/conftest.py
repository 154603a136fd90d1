"""A whole service on the embedded model, started by the command line as a user would, once a front of Serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from deployment.haproxy import free_range
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0
MARK = "ORCA_TEST_RUN"
"""Environment variable that tells the processes of one service from all others."""
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
      engine: {device: cpu, n_slots: 2048, max_model_len: 1024}
      replicas: {min: 2, max: 2, num_cpus: 1, load_report_interval_s: 0.25}
      drain: {timeout_s: 90}
"""


def marked_processes(mark: str) -> dict[int, str]:
    """Ids and command lines of the processes that were started, by whatever way, from the one with this mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # it ended while we looked
    return found


def left_over(mark: str) -> dict[int, str]:
    """Those that are still there after a while: the system takes some time to end what was killed.

    Nobody in several looks: a process that is just being started shows no environment for a moment.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    found, empty = marked_processes(mark), 0
    while time.monotonic() < deadline and empty < 3:
        time.sleep(0.1)
        found = marked_processes(mark)
        empty = 0 if found else empty + 1
    return found


@dataclass
class Server:
    """A running service. ``process``: the one of ``orca-serve up``, leader of its own process group; ``log``: what it
    said on stderr.
    """

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    channel: grpc.Channel
    stub: OrcaServiceStub
    log: Path

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def loads(self) -> list[pb.Load]:
        return [replica.load for replica in self.stub.GetStatus(pb.GetStatusRequest(), timeout=10).replicas]

    def settle(self) -> None:
        """Wait until nothing is reserved, waiting or running on any replica; fail where it stays so."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            loads = self.loads()
            if len(loads) == 2 and not any(
                load.reserved_slots or load.used_slots or load.queued_slots or load.running or load.waiting
                for load in loads
            ):
                return
            assert time.monotonic() < deadline, f"slots are not free: {loads}"
            time.sleep(0.05)


def start(
    folder: Path,
    front: str,
    extra_environment: dict[str, str] | None = None,
    config_text: str = CONFIG,
    command: Sequence[str] = (),
) -> Server:
    """``orca-serve up``, or another command with its arguments, until it says ready. ``front``: throughput or proxy."""
    config = folder / "serve.yaml"
    config.write_text(config_text)
    http_port, grpc_port = free_range(2)
    command = [*(command or (str(Path(sys.executable).with_name("orca-serve")), "up")), str(config)]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    command += ["--plain-proxy"] if front == "proxy" else []
    log = folder / "up.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | (extra_environment or {}),
            start_new_session=True,
        )
    alarm = threading.Timer(READY_TIMEOUT_S, process.terminate)
    alarm.start()
    line = process.stdout.readline() if process.stdout else ""
    alarm.cancel()
    if not line.startswith("ready "):
        with process:
            process.terminate()
        pytest.fail(f"the service did not start: {line}{log.read_text()[-3000:]}")
    channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
    return Server(process, http_port, grpc_port, channel, OrcaServiceStub(channel), log)


def stop(server: Server) -> int:
    """SIGTERM, as a supervisor would; the exit status. Whatever is left of the process group is killed."""
    server.channel.close()
    with server.process as process:
        process.terminate()
        try:
            return process.wait(STOP_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session", params=["throughput", "proxy"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("up"), request.param)
    yield running
    status = stop(running)
    assert status == 0, f"`up` ended with {status}"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", running.grpc_port)) != 0, "the gRPC port is still open"


@pytest.fixture
def settled(server: Server) -> Iterator[Server]:
    """The service, idle before the test and, as the test's last assertion, after it."""
    server.settle()
    yield server
    server.settle()
