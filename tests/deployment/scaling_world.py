"""A service in virtual time whose number of replicas is decided each second, and the demand it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deployment.scaling_decision import Facts, Settings, State, decide
from deployment.scaling_reports import Report

SETTINGS = Settings(target_ratio=0.8, upscale_delay_s=5.0, downscale_delay_s=60.0, stale_after_s=4.0, max_batch_size=16)
N_SLOTS = 1000
FULL = 0.8 * N_SLOTS
"""Slots of demand that one replica is meant to take."""


class World:
    """A service in virtual time: ``reports(running)`` tells of its replicas at each tick of one second."""

    def __init__(
        self,
        reports: Callable[[World], list[Report]],
        *,
        least: int = 1,
        most: int = 8,
        start_s: float = 20.0,
        chosen: Settings = SETTINGS,
    ) -> None:
        self.reports = reports
        self.bounds = (least, most)
        self.start_s = start_s
        self.settings = chosen
        self.now = 100.0
        self.target = self.running = least
        self.starting: list[float] = []
        self.state = State()
        self.targets: list[int] = []
        self.reasons: list[str] = []

    def tick(self) -> None:
        self.now += 1.0
        self.running += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        facts = Facts(self.target, *self.bounds, tuple(self.reports(self)))
        wanted, self.state, reason = decide(self.now, self.state, facts, self.settings)
        if wanted != self.target:
            self.reasons.append(reason)
        self.starting += [self.now + self.start_s] * max(0, wanted - self.target)
        for _ in range(self.target - wanted):
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1
        self.target = wanted
        self.targets.append(wanted)

    def run(self, seconds: int) -> World:
        for _ in range(seconds):
            self.tick()
        return self

    @property
    def n_changes(self) -> int:
        before = [self.bounds[0], *self.targets]
        return sum(a != b for a, b in zip(before, self.targets, strict=False))


def spread(demand: float, request_slots: int = 100) -> Callable[[World], list[Report]]:
    """That demand in slots over the replicas that run, evenly; what they cannot hold is queued."""

    def reports(world: World) -> list[Report]:
        each = demand / world.running
        held = min(each, N_SLOTS)
        made = Report("", world.now, N_SLOTS, int(held), int(each - held),
                      round(held / request_slots), round((each - held) / request_slots))  # fmt: skip
        return [replace(made, replica=f"r{number}") for number in range(world.running)]

    return reports
