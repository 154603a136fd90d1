"""What HAProxy answers by itself: Serve's own configuration, rewritten, and run by the real binary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from deployment.grpc_errors import error_from_grpc
from deployment.haproxy_answers import Pages, with_answers
from orca_core.errors import UnavailableError
from tests.deployment.haproxy_front import Front


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


@pytest.mark.parametrize("leaving", [False, True])
def test_a_second_time_changes_nothing(tmp_path: Path, leaving: bool) -> None:
    for prefixes in ([], ["/"], ["/one", "/two"]):
        once = with_answers(Front(tmp_path, prefixes, leaving=leaving).config.read_text(), Pages(tmp_path))
        assert with_answers(once, Pages(tmp_path)) == once


class Without(BaseHTTPRequestHandler):
    """Serve's own proxy when an application has ended, and our 404 of a path."""

    def do_GET(self) -> None:
        is_probe = self.path == "/-/healthz"
        kind, body = ("text/plain", b"Path not found.") if self.path == "/v1/models" else ("application/json", b"{}")
        self.send_response(200 if is_probe else 404)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # who only asks for the status does not wait for it
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_an_application_that_has_ended_is_not_a_404(tmp_path: Path) -> None:
    """For as long as Serve's own proxy answers, while a service drains."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Without) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        front = Front(tmp_path, ["/"], http_ingress=http.server_port)
        with front.running():
            ended, unknown = front.get("/v1/models"), front.get("/x")
        http.shutdown()
    assert (ended.status_code, ended.headers["retry-after"]) == (503, "1")
    assert unknown.status_code == 404  # what is the application's own word


class Elsewhere(BaseHTTPRequestHandler):
    """An ingress of another node, which is ready. Says what id it was sent."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("was-sent", self.headers.get("x-request-id", "none"))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def ready_elsewhere() -> Iterator[dict[str, Any]]:
    """Its ports: an HTTP and a gRPC server that answer every probe with yes."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield {"http_ingress": http.server_port, "grpc_ingress": port}
        finally:
            http.shutdown()
            server.stop(None).wait()


@pytest.mark.parametrize("prefix", ["/", "/llm"])
def test_a_node_that_leaves_is_not_ready_though_ingresses_elsewhere_are(tmp_path: Path, prefix: str) -> None:
    """Field case F8: a balancer must hear of it from whatever it probes, while requests are still served."""
    path = prefix.rstrip("/")
    with ready_elsewhere() as ports:
        stays, leaves = Front(tmp_path, [prefix], **ports), (tmp_path / "leaves")
        leaves.mkdir()
        goes = Front(leaves, [prefix], leaving=True, **ports)
        with stays.running(), goes.running():
            assert [stays.get(f"{path}/readyz").status_code, stays.probe()] == [200, HealthCheckResponse.SERVING]
            refused = goes.get(f"{path}/readyz")
            assert [refused.status_code, goes.probe()] == [503, grpc.StatusCode.UNAVAILABLE]
            assert refused.json()["error"]["code"] == "unavailable"
            assert goes.get("/-/healthz").status_code == 503  # what Serve itself says
            assert goes.get(f"{path}/v1/models").status_code == 200


@pytest.fixture(scope="module")
def in_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One of ingresses that say what id they were sent."""
    with ready_elsewhere() as ports:
        front = Front(tmp_path_factory.mktemp("front"), ["/"], **ports)
        with front.running():
            yield front


@pytest.mark.parametrize("given", [b"mine-1", b"a,b;c", b"!" + b"~" * 127])
def test_an_id_of_visible_ascii_is_handed_on(in_front: Front, given: bytes) -> None:
    assert in_front.get("/v1/models", {b"x-request-id": given}).headers["was-sent"] == given.decode()


@pytest.mark.parametrize("given", [b"\xff\xfe", "\u00e9".encode(), b"two words", b"x" * 129, b""])
def test_another_one_is_taken_off(in_front: Front, given: bytes) -> None:
    """Serve cannot read what is not UTF-8, and writes the rest into its log as it is."""
    assert in_front.get("/v1/models", {b"x-request-id": given}).headers["was-sent"] == "none"
