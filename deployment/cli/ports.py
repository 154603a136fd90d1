"""Whether ports are free, and whether Ray answers at an address: asked first, since Ray takes its time to say no."""

from __future__ import annotations

import os
import socket
from typing import Final

from deployment.serve_file import ServeFile
from orca_core.errors import ConfigError, UnavailableError

_RAY_S: Final = 5.0
_CLIENT_SCHEME: Final = "ray://"


def check_ports(file: ServeFile) -> None:
    """Raises ``UnavailableError`` where a face cannot listen on its port."""
    for option, name, port in (
        ("--http-port", "http_options.port", file.http_port),
        ("--grpc-port", "grpc_options.port", file.grpc_port),
    ):
        family = socket.AF_INET6 if ":" in file.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((file.host, port))
            except OSError as error:
                reason = f"{error.strerror or 'cannot be bound'}; {option} chooses another"
                raise UnavailableError(f"{name}: {file.host}:{port}: {reason}") from None


def check_ray(address: str, timeout_s: float = _RAY_S) -> None:
    """Ask whether something that may be Ray answers at ``HOST:PORT``; Ray itself would try for more than a minute.

    ``auto`` is left to Ray. Raises ``UnavailableError``, and ``ConfigError`` for what is no address.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix(_CLIENT_SCHEME).rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("--address", f"must be HOST:PORT or auto, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnavailableError(f"cannot join Ray at {address}: nothing answers there ({reason})") from None
    if os.environ.get("RAY_USE_TLS", "0") != "1" and not _speaks_grpc(f"{host}:{port}", timeout_s):
        raise UnavailableError(f"cannot join Ray at {address}: what answers there is not Ray")


def why_not(error: BaseException) -> str:
    """One line of what Ray raised. It says that it failed, and the reason only among the causes."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any("InvalidAuthToken" in str(each) for each in causes):
        return "it wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not the same"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _speaks_grpc(target: str, timeout_s: float) -> bool:
    import grpc

    # Ray talks to its nodes directly, so a proxy of the environment would only mislead
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
        except grpc.FutureTimeoutError:
            return False
    return True
