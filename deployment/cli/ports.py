"""Whether ports are free, and whether Ray answers at an address: asked first, since Ray takes its time to say no."""

from __future__ import annotations

import socket
from typing import Final

from deployment.serve_file import ServeFile
from orca_core.errors import ConfigError, UnavailableError

_RAY_S: Final = 5.0
_ALIVE: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_WHERE: Final = "`ray start --head` says the address (port 6379 unless it is told another)"
_AUTH: Final = "it wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where ~/.ray/auth_token is not the same"
_SCHEMES: Final = {
    "ray": "a Ray client cannot deploy, name the head itself, port 6379 by default",
    "http": "that is the dashboard, which `serve deploy` talks to",
}


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
    """Ask whether the head of a Ray cluster answers at ``HOST:PORT``; Ray itself would try for half a minute or more.

    ``auto`` is left to Ray. Raises ``UnavailableError``, and ``ConfigError`` for what is no such address.
    """
    if address == "auto":
        return
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if scheme or not host or not port.isdigit():
        other = f": {_SCHEMES.get(scheme, 'it has no scheme')}" if scheme else ""
        raise ConfigError("--address", f"must be HOST:PORT or auto, not {address!r}{other}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnavailableError(f"cannot join Ray at {address}: nothing answers there ({reason}); {_WHERE}") from None
    reason = _refusal(rest, timeout_s)
    if reason is not None:
        raise UnavailableError(f"cannot join Ray at {address}: {reason}")


def why_not(error: BaseException) -> str:
    """One line of what Ray raised. It says that it failed, and the reason only among the causes."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any("InvalidAuthToken" in str(each) for each in causes):
        return _AUTH
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refusal(target: str, timeout_s: float) -> str | None:
    """Why what answers at an address cannot be joined; ``None`` where Ray may try."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel  # which knows of Ray's token and TLS

    # Ray talks to its nodes directly, so a proxy of the environment would only mislead
    with init_grpc_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
            channel.unary_unary(_ALIVE)(b"", timeout=timeout_s)
        except grpc.FutureTimeoutError:
            return f"what answers there is not Ray; {_WHERE}"
        except grpc.RpcError as error:
            reasons = {
                grpc.StatusCode.UNIMPLEMENTED: f"what answers there is not the head of a Ray cluster; {_WHERE}",
                grpc.StatusCode.UNAUTHENTICATED: _AUTH,
            }
            return reasons.get(error.code())
    return None
