"""What ``status`` says of replicas that no ingress can see: those that start and those that end."""

from __future__ import annotations

import asyncio
import threading
from io import StringIO
from typing import Any

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus
from rich.console import Console

from deployment import deployed
from deployment.cli.status import _page
from deployment.deployed import DeployedBoard, ask_serve, counts_of
from deployment.serving import DeployedReplicas, ScalingStatus, ServiceStatus
from tests.deployment.fake_service import MODEL


def test_all_but_those_that_start_or_stop_take_requests() -> None:
    states = {"RUNNING": 2, "RECOVERING": 1, "UPDATING": 1, "STARTING": 3, "STOPPING": 4, "STOPPED": 9}
    assert counts_of(states, "") == DeployedReplicas(4, 3, 4)
    assert counts_of({}, "\n  one\n two").message == "one"
    assert len(counts_of({}, 9999 * "x").message) < 1000


async def test_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that hangs holds up one thread, whoever asks how often."""
    monkeypatch.setattr(deployed, "READ_TIMEOUT_S", 0.01)
    asked: list[int] = []
    answers = threading.Event()

    def ask() -> DeployedReplicas:
        asked.append(1)
        answers.wait()
        return DeployedReplicas(1, 0, 0)

    board = DeployedBoard(ask)
    assert await asyncio.gather(board.read(), board.read()) == [None, None]
    assert await board.read() is None
    assert len(asked) == 1
    monkeypatch.setattr(deployed, "READ_TIMEOUT_S", 60.0)
    answers.set()
    assert await board.read() == DeployedReplicas(1, 0, 0)


async def test_serve_that_fails_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    board = DeployedBoard(lambda: {}["no such application"])
    assert [await board.read(), await board.read()] == [None, None]
    assert caplog.messages == 2 * ["Serve does not say how many replicas there are: KeyError"]


@pytest.mark.parametrize("starting", ["STARTING", ReplicaState.STARTING])
def test_what_serve_says_of_an_application(monkeypatch: pytest.MonkeyPatch, starting: Any) -> None:
    """Its keys are of a type that says states, but plain text where the status was sent from the controller."""
    replicas = DeploymentStatusOverview(
        status=DeploymentStatus.UPDATING,
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        replica_states={starting: 2},
        message="they wait for 64 CPUs",
    )
    application = ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, {"Replica": replicas})
    status = ServeStatus(applications={"orca": application})
    monkeypatch.setattr("ray.serve.status", lambda: status)
    assert ask_serve("orca") == DeployedReplicas(0, 2, 0, "they wait for 64 CPUs")
    assert ask_serve("another") is None
    application.deployments.clear()
    assert ask_serve("orca") is None


def drawn(counts: DeployedReplicas | None, target: int | None = None) -> str:
    scaling = None if target is None else ScalingStatus(target, 0, "nothing to do", 1.0)
    out = StringIO()
    Console(file=out, width=120).print(_page(ServiceStatus(MODEL, (), scaling=scaling, deployed=counts), None, 0.0))
    return out.getvalue()


def test_a_service_without_a_replica_says_what_it_waits_for() -> None:
    loading = drawn(DeployedReplicas(0, 2, 1, "they wait for 64 CPUs"))
    assert "no replica ready, 2 starting" in loading
    assert [line.split()[:2] for line in loading.splitlines()[2:4]] == [["2", "starting"], ["1", "stopping"]]
    assert "Serve: they wait for 64 CPUs" in loading
    assert "zero replicas: the next request starts one" in drawn(DeployedReplicas(0, 0, 0), target=0)
    assert "no replica ready, 1 starting" in drawn(DeployedReplicas(0, 1, 0), target=0)
    assert "no replica ready  waiting" in drawn(None)
