"""The policy as Serve calls it: its context read, its state carried, pickled into a process that has not our module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo

from deployment import app
from deployment.autoscaling import QueueDepthPolicy, facts_of
from deployment.config import AppConfig
from deployment.scaling_board import ScalingBoard
from deployment.scaling_reports import Report, scaling_stats
from orca_core.types import Load

ARGS = {
    "engine": {"max_batch_size": 16},
    "replicas": {"min": 1, "max": 4},
    "autoscaling": {"target_queued_slots_ratio": 0.5, "upscale_delay_s": 5.0, "downscale_delay_s": 30.0},
}
DEPLOYMENT = DeploymentID("Replica", "orca")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Controller:
    """As much of Serve's controller as decides about one deployment."""

    def __init__(self, clock: Clock, n_running: int = 1, least: int = 1) -> None:
        self.clock = clock
        args = {**ARGS, "replicas": {"min": least, "max": 4}}
        options = app.replica_options(AppConfig.parse(args))
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        config = DeploymentConfig(autoscaling_config=options["autoscaling_config"])
        config = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())  # on its way to the controller
        self.target = self.state.register(DeploymentInfo(config, None, 0, "job"), n_running)  # type: ignore[arg-type]
        self.state._policy.__wrapped__._clock = clock  # type: ignore[union-attr]
        self.shelf: dict[bytes, bytes] = {}
        store = SimpleNamespace(put=self.shelf.__setitem__, get=self.shelf.get)
        self.state._policy.__wrapped__._store = store  # type: ignore[union-attr]
        self.state._policy.__wrapped__._wall_clock = clock  # type: ignore[union-attr]
        self.run(n_running)

    def run(self, n_running: int) -> None:
        self.replicas = [ReplicaID(f"r{number}", DEPLOYMENT) for number in range(n_running)]
        self.state.update_running_replica_ids(self.replicas)

    def report(self, load: Load) -> None:
        stats = scaling_stats(load, 0, 0)
        for replica in self.replicas:
            series = {name: [TimeStampedValue(self.clock.now - 1, 0.0), TimeStampedValue(self.clock.now, value)]
                      for name, value in stats.items()}  # fmt: skip
            report = ReplicaMetricReport(replica_id=replica, timestamp=self.clock.now, metrics=series)
            self.state.record_request_metrics_for_replica(report)

    def turn(self, seconds: float = 1.0) -> int:
        self.clock.now += seconds
        self.target = self.state.get_decision_num_replicas(self.target)
        return self.target


@pytest.fixture
def controller_log() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ray.serve")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_serve_scales_on_our_word_and_adds_no_delay(clock: Clock, controller_log: list[str]) -> None:
    controller = Controller(clock)
    full = Load(n_slots=1000, reserved_slots=1000, queued_slots=400)
    targets = []
    for _ in range(8):
        controller.report(full)
        targets.append(controller.turn())
    assert targets == [1] * 5 + [3] * 3, "five seconds after the wish began, not later"
    said = [line for line in controller_log if line.startswith("autoscaling Replica")]
    seen = "1000 reserved, 400 queued, 0 slots in line, 0 requests: 1.40 replicas full, for 5.0 s"
    assert said == [f"autoscaling Replica: 1 -> 3 replicas: {seen}"]
    idle = Load(n_slots=1000)
    for _ in range(31):
        controller.report(idle)
        targets.append(controller.turn())
    assert controller.target == 1
    assert targets.count(3) == 33


async def test_the_last_decision_and_the_last_change_are_written_down(clock: Clock) -> None:
    controller = Controller(clock)
    board = ScalingBoard(SimpleNamespace(get=controller.shelf.get), "orca", clock)  # type: ignore[arg-type]
    for _ in range(6):
        controller.report(Load(n_slots=1000, reserved_slots=1000, queued_slots=400))
        controller.turn()
    changed = await board.read()
    assert changed is not None
    assert (changed.target, changed.actual, changed.age_s) == (3, 1, 0.0)
    assert changed.reason == changed.last_change
    assert changed.reason.startswith("1 -> 3 replicas: 1000 reserved")
    for _ in range(2):
        controller.report(Load(n_slots=1000, reserved_slots=900))
        controller.turn()
    clock.now += 0.5
    later = await board.read()
    assert later is not None
    assert (later.target, later.age_s, later.last_change_age_s) == (3, 0.5, 2.5)
    assert later.reason.startswith("3 replicas: 900 reserved")
    assert later.last_change == changed.last_change


async def test_to_zero_and_back(clock: Clock) -> None:
    """Serve itself wakes a deployment without replicas, at once, as soon as a call waits in a handle."""
    controller = Controller(clock, least=0)
    board = ScalingBoard(SimpleNamespace(get=controller.shelf.get), "orca", clock)  # type: ignore[arg-type]
    for _ in range(35):
        controller.report(Load(n_slots=1000))
        controller.turn()
    assert controller.target == 0
    controller.run(0)
    for _ in range(5):
        assert controller.turn() == 0, "nobody wants anything"
    for _ in range(60):
        clock.now += 1.0
        queued = [TimeStampedValue(clock.now, 1.0)]
        handle = HandleMetricReport(DEPLOYMENT, "h", "", DeploymentHandleSource.REPLICA, queued, {}, clock.now)
        controller.state.record_request_metrics_for_handle(handle)
        assert controller.turn(0.0) == 1, "at once, and for as long as the model loads"
    controller.run(1)
    controller.report(Load(n_slots=1000, reserved_slots=100, running=1))
    controller.turn()
    said = await board.read()
    assert said is not None
    assert (said.target, said.last_change) == (1, "0 -> 1 replicas: somebody waited for the first")


def test_between_decisions_the_target_stays(clock: Clock) -> None:
    controller = Controller(clock)
    controller.turn()
    state = controller.state._policy_state
    for _ in range(9):
        controller.report(Load(n_slots=1000, reserved_slots=1000, queued_slots=9000))
        assert controller.turn(0.1) == 1
    assert controller.state._policy_state["orca"] is state["orca"]
    controller.turn(0.2)
    assert controller.state._policy_state["orca"] is not state["orca"]


def context_of(controller: Controller) -> Any:
    return controller.state.get_autoscaling_context(controller.target)


def test_facts_are_the_last_reports(clock: Clock) -> None:
    controller = Controller(clock, n_running=2)
    assert facts_of(context_of(controller)).reports == (Report("r0"), Report("r1"))
    controller.report(Load(n_slots=1000, reserved_slots=700, running=3))
    facts = facts_of(context_of(controller))
    assert facts.reports[0] == Report("r0", clock.now, 1000, 700, 0, 3, 0)
    assert (facts.target, facts.min_replicas, facts.max_replicas) == (1, 1, 4)
    stale = controller.state._replica_metrics[controller.replicas[0]].metrics["orca_running"]
    stale[-1] = TimeStampedValue(clock.now - 3, 3.0)
    assert facts_of(context_of(controller)).reports[0].running == 0, "no longer reported"


def test_the_policy_is_called_by_name_in_another_process() -> None:
    """Serve pickles the module by value; what arrives must be whole."""
    policy = app.replica_options(AppConfig.parse(ARGS))["autoscaling_config"].policy
    arrived = policy.get_policy()(**policy.policy_kwargs)
    assert type(arrived).__name__ == QueueDepthPolicy.__name__
    assert arrived._settings.target_ratio == 0.5
    assert arrived._settings.max_batch_size == 16
