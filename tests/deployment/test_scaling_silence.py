"""The number of replicas in virtual time: replicas that say nothing, or always the same."""

from __future__ import annotations

from dataclasses import replace

from deployment.scaling_decision import Facts, State, decide
from deployment.scaling_reports import Report
from tests.deployment.scaling_world import FULL, N_SLOTS, SETTINGS, World, spread


def silent(world: World) -> list[Report]:
    return [Report(f"r{number}") for number in range(world.running)]


def test_a_report_that_stays_the_same_is_no_load_for_ever() -> None:
    """Field case F2: the last word of a replica that hangs was of a full queue. It ends counting, and is not added."""
    world = World(spread(2 * FULL)).run(60)
    assert world.target == 2
    stuck = [Report(f"r{n}", world.now, N_SLOTS, 1000, 50_000, 16, 500) for n in range(2)]
    world.reports = lambda _: stuck
    world.run(4)
    assert world.target == 2, "a burst shorter than the delay"
    world = World(spread(2 * FULL)).run(60)
    world.reports = lambda w: [replace(stuck[0], reserved_slots=0, queued_slots=0, running=0, waiting=0), stuck[1]]
    world.run(400)
    assert max(world.targets) >= 2
    assert world.target == 1, "in the end, an idle service is small"


def test_silence_alone_shrinks_nothing_at_once() -> None:
    world = World(spread(4 * FULL)).run(60)
    assert world.target == 4
    world.reports = silent
    world.run(int(SETTINGS.downscale_delay_s + SETTINGS.stale_after_s))
    assert world.target == 4, "for a delay nothing is concluded; then the wish must last as well"
    world.run(int(2 * SETTINGS.downscale_delay_s))
    assert world.target == 1


def test_one_silent_replica_holds_the_others_for_a_while() -> None:
    world = World(spread(4 * FULL)).run(60)
    world.reports = lambda w: [Report("r0"), *(Report(f"r{n}", w.now, N_SLOTS) for n in range(1, w.running))]
    world.run(65)
    assert world.target == 4
    world.run(80)
    assert world.target == 1


def test_silence_with_no_delay_is_still_no_reason_to_shrink_at_once() -> None:
    world = World(spread(2 * FULL), chosen=replace(SETTINGS, downscale_delay_s=0.0)).run(30)
    world.reports = silent
    assert world.run(7).target == 2


def test_no_replica_runs() -> None:
    """All of them died: their number stays, and what waits for one counts."""
    facts = Facts(3, 1, 8, (), unplaced_requests=64)
    state, target = State(), 3
    for second in range(10):
        target, state, _ = decide(float(second), state, facts, SETTINGS)
        if target != 3:
            break
    assert target == 5  # 64 requests / (0.8 * 16)
    assert decide(0.0, State(), Facts(3, 1, 8), SETTINGS).replicas == 3
