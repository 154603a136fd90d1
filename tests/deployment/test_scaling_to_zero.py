"""The number of replicas in virtual time: an idle service, down to none at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deployment.scaling_reports import Report
from tests.deployment.scaling_world import FULL, N_SLOTS, SETTINGS, World, spread


def to_zero(reports: Callable[[World], list[Report]], **given: float) -> World:
    return World(reports, least=0, **given)  # type: ignore[arg-type]


def idle(world: World) -> list[Report]:
    return [Report(f"r{n}", world.now, N_SLOTS, tokens=7) for n in range(world.running)]


def test_an_idle_service_goes_to_the_least() -> None:
    world = World(spread(0), least=1)
    world.target = world.running = 5
    assert world.run(61).target == 1
    world = World(spread(0), least=0)
    world.target = world.running = 1
    assert world.run(61).target == 0


def test_a_replica_that_was_just_loaded_is_kept_for_the_whole_delay() -> None:
    """It took longer to load than the delay is long: nobody could have wanted anything of it."""
    world = to_zero(idle, start_s=300.0)
    world.target, world.starting = 1, [world.now + 300.0]
    world.run(300)
    assert (world.target, world.running) == (1, 1)
    assert world.run(59).target == 1
    assert world.run(2).target == 0


def test_requests_that_come_and_go_between_two_reports_keep_a_service_up() -> None:
    def reports(world: World) -> list[Report]:
        return [replace(each, tokens=2 * (int(world.now) // 20)) for each in idle(world)]

    world = to_zero(reports)
    world.target = world.running = 1
    assert set(world.run(300).targets) == {1}


def test_an_idle_service_is_at_zero_one_delay_after_its_last_work() -> None:
    """By one, as Serve does it, and says so."""
    world = World(spread(3 * FULL)).run(60)
    assert world.target == 3
    world.bounds = (0, 8)
    world.reports = spread(1.5 * FULL)
    world.run(30)
    world.reports = lambda w: [Report(f"r{n}", w.now, N_SLOTS) for n in range(w.running)]
    world.run(round(SETTINGS.downscale_delay_s) + 3)
    assert world.target == 0
    assert [reason.partition(" replicas")[0] for reason in world.reasons[-3:]] == ["3 -> 2", "2 -> 1", "1 -> 0"]
