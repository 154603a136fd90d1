"""Ingresses that listen on one address alone: Serve's configuration, the real binary."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployment.haproxy_hosts import with_hosts
from tests.deployment.haproxy_front import Front


class Ingress(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "server"), [("127.0.0.1", ThreadingHTTPServer), ("127.0.0.2", ThreadingHTTPServer), ("::1", Server6)]
)
def test_an_ingress_is_reached_where_it_listens(tmp_path: Path, host: str, server: type[ThreadingHTTPServer]) -> None:
    try:
        http = server((host, 0), Ingress)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        front = Front(tmp_path, ["/"], http_ingress=http.server_port, host=host)
        with front.running():
            status = front.get("/v1/models").status_code
        http.shutdown()
    assert status == 200


def test_on_all_addresses_loopback_is_right(tmp_path: Path) -> None:
    config = Front(tmp_path, ["/"], host="0.0.0.0").config.read_text()
    assert " 127.0.0.1:" in config
    assert with_hosts(config) == config


def test_grpc_stays_on_loopback(tmp_path: Path) -> None:
    """Serve binds it to all interfaces."""
    config = with_hosts(Front(tmp_path, ["/"], host="127.0.0.2").config.read_text())
    http, grpc = config.split("frontend grpc_frontend")
    assert "127.0.0.1:" not in http.split("frontend http_frontend")[1]
    assert " 127.0.0.1:" in grpc
    assert with_hosts(config) == config
