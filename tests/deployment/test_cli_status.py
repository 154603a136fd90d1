"""``orca-serve status``: what is shown, and how: on a terminal, in a file, again and again."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from rich.console import Console

from deployment.cli.main import main
from deployment.serving import DeployedReplicas, ReplicaStatus, ServiceStatus
from orca_core.types import Load
from tests.deployment.fake_service import MODEL
from tests.deployment.grpc_server import FakeIngress, serving

status_module = import_module("deployment.cli.status")


@pytest.fixture
def service() -> FakeIngress:
    return FakeIngress()


@pytest.fixture
def address(service: FakeIngress) -> Iterator[str]:
    with serving(service) as address:
        yield address


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_status(capsys: pytest.CaptureFixture[str], address: str) -> None:
    status, out, _ = run(capsys, "status", "--address", address)
    assert status == 0
    assert all(word in out for word in ("r1", "256", "146", MODEL.model_id, "waiting 2 requests"))
    body = json.loads(run(capsys, "status", "--json", "--address", address)[1])
    assert body["replicas"][0]["load"]["headroom"] == 146
    assert body["replicas"][0]["load"]["unused_slots"] == 50
    assert body["waiting_requests"] == 2
    assert body["scaling"]["reason"] == "2 replicas: quite enough"


def test_status_says_what_is_missing_and_why_there_are_as_many_replicas(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    _, out, _ = run(capsys, "status", "--address", address)
    assert "r2 (silent)" in out
    assert "1 starting" in out
    assert "1 stopping" in out
    assert "Serve: 1 replica waits for room" in out
    assert "1 of 2 ingresses answered" in out
    assert "3 s ago: 2 replicas: quite enough (1 running)" in " ".join(out.split())
    assert "61 s ago: 1 -> 2 replicas: too much" in " ".join(out.split())


def test_a_replica_that_serve_takes_away_is_leaving_not_silent(
    capsys: pytest.CaptureFixture[str], address: str, service: FakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = (
        ReplicaStatus("r1", Load(64), 0.1),
        ReplicaStatus("r2", Load(64), 0.4, silent=True),
        ReplicaStatus("r3", Load(64), 2.5, silent=True),
    )

    def shown(*, stopping: int) -> list[str]:
        said = ServiceStatus(MODEL, replicas, deployed=DeployedReplicas(2, 0, stopping, ""))
        monkeypatch.setattr(service, "status", AsyncMock(return_value=said))
        rows = run(capsys, "status", "--address", address)[1].splitlines()[2:]
        return [row.partition("  ")[0] for row in rows]

    assert shown(stopping=2) == ["r1", "r2 (leaving)", "r3 (silent)", "1 stopping"]
    assert shown(stopping=1) == ["r1", "r2 (leaving)", "r3 (silent)"]
    assert shown(stopping=0) == ["r1", "r2 (silent)", "r3 (silent)"]


def test_lines_of_status_are_whole_in_a_file(
    capsys: pytest.CaptureFixture[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line.rstrip() for line in run(capsys, "status", "--address", address)[1].splitlines()]
    assert lines[0] == "tiny/model  ready  waiting 2 requests, 30 slots"
    assert "1 of 2 ingresses answered: line and totals are theirs" in lines
    assert "scaling, 3 s ago: 2 replicas: quite enough (1 running)" in lines
    assert lines[1].split()[-2:] == ["age", "s"]


def test_status_has_the_width_of_the_terminal(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "zero of one " * 9
    page = status_module._page(ServiceStatus(MODEL, (), deployed=DeployedReplicas(0, 0, 0, long)), None, 0.0)
    console = Console(file=io.StringIO(), width=130, force_terminal=True, color_system=None)
    console.print(page)
    assert f"Serve: {long.strip()}" in [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_status_watch_counts_rates(
    capsys: pytest.CaptureFixture[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([None, KeyboardInterrupt()])
    frames = []

    def sleep(_: float) -> None:
        frames.append(capsys.readouterr().out)
        reading = next(readings)
        if reading is not None:
            raise reading

    monkeypatch.setattr("deployment.cli.status.time", SimpleNamespace(sleep=sleep, monotonic=iter(range(9)).__next__))
    status, out, _ = run(capsys, "status", "--watch", "--address", address)
    assert (status, out) == (0, "")
    assert [frame.count("waiting 2 requests") for frame in frames] == [1, 1], "into a pipe: a frame as it is read"
    assert "\x1b" not in "".join(frames)
    assert ["0.0" in frame for frame in frames] == [False, True]
