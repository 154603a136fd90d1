"""The two ports of a service that ``up`` starts: whether they answer yet."""

from __future__ import annotations

import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.request import ProxyHandler, build_opener

from orca_core.errors import UnauthenticatedError, UnavailableError

if TYPE_CHECKING:
    from deployment.serve_file import ServeFile

_POLL_S: Final = 0.25
_PROBE_S: Final = 5.0


def wait_for_ports(file: ServeFile, deadline: float) -> None:
    """Until both answer: the proxies learn of the application a moment after Serve calls it running, each by itself.

    ``deadline``: on the monotonic clock, seconds. Raises ``UnavailableError`` when it passes.
    """
    from deployment.client import OrcaClient

    host = reachable(file.host)
    while time.monotonic() < deadline:
        with suppress(Exception), OrcaClient(f"{host}:{file.grpc_port}") as client:
            probe = "livez"
            try:
                client.model()
            except UnauthenticatedError:  # of an ingress that may know of no replica yet
                probe = "readyz"
            if _says_yes(file, host, probe):
                return
        time.sleep(_POLL_S)
    raise UnavailableError(f"the ports {file.grpc_port} (gRPC) and {file.http_port} (HTTP) of {host} did not answer")


def reachable(host: str) -> str:
    """An address to call where a service listens on ``host``, as it stands in a URL."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104


def _says_yes(file: ServeFile, host: str, probe: str) -> bool:
    """Whether the probe does; it needs no key. Past any proxy that the environment names."""
    if (file.document.get("http_options") or {}).get("ssl_certfile"):
        return True  # the certificate names another host than the one that is asked here
    prefix = str(file.document["applications"][0].get("route_prefix") or "/").rstrip("/")
    url = f"http://{host}:{file.http_port}{prefix}/{probe}"
    with build_opener(ProxyHandler({})).open(url, timeout=_PROBE_S) as answer:
        return int(answer.status) == HTTPStatus.OK
