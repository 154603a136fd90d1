"""A Ray cluster of several nodes on one machine, each started by ``ray start`` as on machines of their own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployment.haproxy import BINARY_VARIABLE, free_range, installed_command, own_environment
from tests.e2e.conftest import MARK, marked_processes, start, stop
from tests.e2e.paced_service import INGRESS, Paced, config_of, wait_until

DRAIN_S = 60
_ARENA = 100 * 2**20
_PORTS_OF_A_NODE = 4


@dataclass
class Node:
    """``process``: of ``ray start --block``, whose children are the node's processes. ``log``: what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def raylet(self) -> psutil.Process:
        (found,) = (each for each in psutil.Process(self.process.pid).children() if each.name() == "raylet")
        return found

    def pids(self, kind: str) -> set[int]:
        """Ids of its actors of that kind: they are children of its raylet."""
        return {each.pid for each in self.raylet.children(recursive=True) if _command(each).startswith(f"ray::{kind}")}

    def lose(self) -> None:
        """As where the power goes: the raylet first, and whatever it had started with it."""
        lost = [self.raylet, *self.raylet.children(recursive=True)]
        for each in lost:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def leave(self) -> None:
        """SIGTERM: Ray drains the node and ends it, and does not run out of time."""
        self.process.terminate()
        self.process.wait(DRAIN_S + 30)
        assert "did not finish draining" not in self.log.read_text()


def _command(process: psutil.Process) -> str:
    try:
        return process.cmdline()[0]
    except (psutil.Error, IndexError):
        return ""


@dataclass
class Nodes:
    """The nodes of one cluster. ``environment``: what every one of them needs, and their clients too."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = field(default_factory=lambda: free_range(1).start)
    started: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        haproxy = own_environment(str(self.folder), DRAIN_S)  # several Serves of one machine want the same ports
        self.environment = {
            MARK: self.mark,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
            BINARY_VARIABLE: installed_command() or "",
            **haproxy,
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, name: str, n_cpus: int) -> Node:
        """One more; the first one is the head."""
        agent, agent_grpc, metrics, environment = free_range(_PORTS_OF_A_NODE)
        options = {
            "node-ip-address": "127.0.0.1",
            "num-cpus": n_cpus,
            "num-gpus": 0,
            "object-store-memory": _ARENA,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": agent,
            "dashboard-agent-grpc-port": agent_grpc,
            "metrics-export-port": metrics,
            "runtime-env-agent-port": environment,
        }
        if self.started:
            options |= {"address": self.address}
        else:
            options |= {"port": self.port, "include-dashboard": "false", "temp-dir": str(self.folder)}
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        command += ["--head"] if not self.started else []
        command += [f"--{option}={value}" for option, value in options.items()]
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | self.environment
            )
        node = Node(process, log)
        self.started.append(node)

        def joined() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return b"Ray runtime started" in log.read_bytes()

        wait_until(f"{name} joins", joined)
        return node

    def end(self) -> None:
        """All of them, and nothing stays."""
        for node in reversed(self.started):
            node.process.kill()
            node.process.wait(30)
        for pid in marked_processes(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until("no process is left", lambda: not marked_processes(self.mark), 60)


@contextmanager
def paced_cluster(folder: Path, iteration_ms: float, n_cpus: int, *args: str) -> Iterator[tuple[Paced, Nodes]]:
    """A head and a worker of so many CPUs each, and a service on both whose ingresses are on the head.

    The worker joins when the ingresses are there, while replicas wait for room: so no ingress can come to lie on it.
    """
    nodes = Nodes(folder)
    command = [sys.executable, "-m", "deployment.cli.paced", "--iteration-ms", str(iteration_ms)]
    command += ["--address", nodes.address]
    try:
        nodes.add("head", n_cpus)
        with ThreadPoolExecutor(1) as pool:
            text = "proxy_location: HeadOnly\n" + config_of(*args)
            starting = pool.submit(start, folder, "throughput", nodes.environment, text, command)
            wait_until("an ingress on the head", lambda: starting.done() or bool(nodes.started[0].pids(INGRESS)))
            nodes.add("worker", n_cpus)
            server = starting.result()
        try:
            yield Paced(server, nodes.mark, nodes.environment, folder, args, iteration_ms), nodes
        finally:
            status = stop(server)
        assert status == 0, server.log.read_text()[-3000:]
    finally:
        nodes.end()
