"""A service whose engines have no model, with faults at hand: its processes by what they are, and signals for them."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import MARK, Server, marked_processes, start, stop

FULL = os.environ.get("ORCA_CHAOS") == "full"
"""The long form: as many faults, and for as long, as one would want before a release."""

PATIENCE_S = 120.0
"""For anything that will happen if it happens at all."""

INGRESS, REPLICA, CONTROLLER = "ServeReplica:orca:Ingress", "ServeReplica:orca:Replica", "ServeController"
_CONFIG = """
grpc_options:
  grpc_servicer_functions:
    - deployment.grpc_api.add_orca_service
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
applications:
  - name: orca
    import_path: deployment.app:build
    route_prefix: /
    args:
"""


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    """Seconds it took. Whatever the service answers while it is disturbed is no reason to give up."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except (grpc.RpcError, httpx.TransportError):
            pass
        assert time.monotonic() - began < timeout_s, what
        time.sleep(0.1)


def say(test: str, **figures: Any) -> None:
    """For people: a line of JSON in the file that ``ORCA_CHAOS_FIGURES`` names, if it does."""
    if path := os.environ.get("ORCA_CHAOS_FIGURES"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": test, **figures}) + "\n")


@dataclass
class Paced:
    """A running one. ``args``: of the application, a YAML mapping a line; ``iteration_ms``: what an iteration takes.

    ``environment``: what its processes have beyond ours.
    """

    server: Server
    mark: str
    environment: dict[str, str]
    folder: Path
    args: tuple[str, ...]
    iteration_ms: float
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    def status(self) -> pb.GetStatusResponse:
        """What one of the ingresses says."""
        answer: pb.GetStatusResponse = self.server.stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        return answer

    # ---- processes

    def pids(self, kind: str) -> list[int]:
        """Processes of that kind which have finished their start."""
        return [
            pid
            for pid, command in marked_processes(self.mark).items()
            if command.startswith(f"ray::{kind}") and "initialize" not in command
        ]

    def signal_one(self, kind: str, number: signal.Signals) -> int:
        """Send a signal to one of that kind, by chance; its id."""
        pid = self.rng.choice(self.pids(kind))
        os.kill(pid, number)
        return pid

    # ---- states

    def wait_for_replicas(self, n: int) -> float:
        """Until so many answer; seconds it took."""
        return wait_until(f"{n} replicas", lambda: len(self.status().replicas) == n)

    def settle(self, n_replicas: int) -> None:
        """Until nothing is reserved, waiting or running anywhere, whichever ingress is asked."""

        def idle() -> bool:
            return all(self._is_idle(self.status(), n_replicas) for _ in range(6))

        wait_until("everything at zero", idle)

    @staticmethod
    def _is_idle(status: pb.GetStatusResponse, n_replicas: int) -> bool:
        loads = [replica.load for replica in status.replicas]
        return len(loads) == n_replicas and not (
            status.waiting_requests
            or status.waiting_slots
            or any(ld.reserved_slots or ld.used_slots or ld.queued_slots or ld.running or ld.waiting for ld in loads)
        )

    # ---- metrics

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over all processes, of those samples whose labels hold ``label``."""
        found = re.search(r"^metrics: (\S+)$", self.server.log.read_text(), re.MULTILINE)
        assert found is not None, self.server.log.read_text()
        samples = re.findall(rf"^ray_{name}(?:\{{(.*)\}})? (\S+)$", httpx.get(found[1], timeout=20).text, re.MULTILINE)
        return sum(float(value) for labels, value in samples if label in labels)

    # ---- a new version

    @contextmanager
    def redeployed(self, **changes: str) -> Iterator[None]:
        """Deploy the application anew with other args, as ``up --address`` does, from a process that joins this Ray.

        Inside, the new version is being rolled out; at the end that is over.
        """
        address = next(
            found[1]
            for command in marked_processes(self.mark).values()
            if (found := re.search(r"raylet/raylet .*--gcs-address=(\S+)", command))
        )
        config = self.folder / "next.yaml"
        config.write_text(config_of(*(changes.get(line.partition(":")[0], line) for line in self.args)))
        command = [*_command(self.iteration_ms), str(config), "--address", address]
        command += ["--http-port", str(self.server.http_port), "--grpc-port", str(self.server.grpc_port)]
        said = self.folder / "next.log"
        with said.open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | self.environment
            )
        with process:
            try:
                yield
                line = process.stdout.readline() if process.stdout else ""
                assert line.startswith("ready "), line + said.read_text()[-3000:]
            finally:
                process.kill()  # SIGTERM would end the application


def config_of(*args: str, top: str = "") -> str:
    """A Serve config with these args. ``top``: a line beside ``applications``."""
    return f"{top}\n{_CONFIG}" + "".join(f"      {line}\n" for line in args)


def _command(iteration_ms: float) -> list[str]:
    return [sys.executable, "-m", "deployment.cli.paced", "--iteration-ms", str(iteration_ms)]


@contextmanager
def paced_service(folder: Path, iteration_ms: float, *args: str, top: str = "") -> Iterator[Paced]:
    """Start one, and see that it ends as it should, with nothing left. ``top``: see ``config_of``."""
    mark = uuid.uuid4().hex
    # a token of its own lets another process of the test join this Ray
    environment = {MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    server = start(folder, "throughput", environment, config_of(*args, top=top), _command(iteration_ms))
    try:
        yield Paced(server, mark, environment, folder, args, iteration_ms)
    finally:
        status = stop(server)
    assert status == 0, server.log.read_text()[-3000:]
    wait_until("no process is left", lambda: not marked_processes(mark), 60)


def rss_mb(pid: int) -> float:
    """Memory of a process."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20
