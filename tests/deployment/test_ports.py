"""Addresses of Ray that ``up`` is given: whatever is no head of a cluster is one line, at once."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import grpc
import pytest

from deployment.cli.ports import check_ray, why_not
from orca_core.errors import ConfigError, UnavailableError
from tests.deployment.grpc_server import FakeIngress, serving


def test_nobody_at_the_address_of_ray() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnavailableError) as caught:
        check_ray(address)
    assert str(caught.value).startswith(f"cannot join Ray at {address}: nothing answers there (Connection refused); ")
    assert "port 6379 unless" in str(caught.value)


def test_something_else_at_the_address_of_ray() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UnavailableError, match="what answers there is not Ray"):
            check_ray(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)


class Gcs(grpc.GenericRpcHandler):
    """As much of a head as is asked. ``code``: what it says."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if not details.method.endswith("GcsService/CheckAlive"):
            return None
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        if self.code is not grpc.StatusCode.OK:
            context.abort(self.code, "no")
        return b""


def test_an_address_where_grpc_but_no_head_answers() -> None:
    """The port of a Ray client, of a raylet, or our own: Ray would try for half a minute."""
    with serving(FakeIngress()) as address, pytest.raises(UnavailableError) as caught:
        check_ray(address)
    said = f"cannot join Ray at {address}: what answers there is not the head of a Ray cluster; `ray start --head` says"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL])
def test_a_head_is_left_to_ray_but_for_its_token(code: grpc.StatusCode) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Gcs(code)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    wants_token = code is grpc.StatusCode.UNAUTHENTICATED
    try:
        with (
            pytest.raises(UnavailableError, match="it wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN")
            if wants_token
            else nullcontext()
        ):
            check_ray(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("address", ["somewhere", "host:", ":1", "host:x", "ray://host"])
def test_no_address_of_ray(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT or auto"):
        check_ray(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [("ray://127.0.0.1:10001", "name the head itself"), ("http://127.0.0.1:8265", "`serve deploy` talks to")],
)
def test_the_address_of_another_part_of_ray(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_ray(address)
    assert caught.value.field == "--address"


def test_auto_is_for_ray_to_find() -> None:
    check_ray("auto")


def test_why_ray_could_not_be_joined() -> None:
    outer = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379\nand more")
    assert why_not(outer) == "Failed to connect to Ray cluster at 10.0.0.1:6379"
    outer.__cause__ = RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing")
    assert why_not(outer).startswith("it wants its token: set RAY_AUTH_MODE=token")
