"""The number of replicas in virtual time: steps, steady loads, spikes, bounds. No clock, no Ray."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.scaling_decision import FULL_RATE_MEMORY, Facts, State, decide, measure
from deployment.scaling_reports import Report
from tests.deployment.scaling_world import FULL, N_SLOTS, SETTINGS, World, spread


def test_a_step_to_four_replicas_of_demand_reaches_four_and_returns() -> None:
    world = World(spread(0)).run(30)
    assert set(world.targets) == {1}
    world.reports = spread(4 * FULL)
    world.run(120)
    assert max(world.targets) == world.target == 4, "reached, and never passed, though new ones start for 20 s"
    assert world.targets.index(4) - 30 <= SETTINGS.upscale_delay_s
    assert world.n_changes == 1
    world.reports = spread(0)
    world.run(59)
    assert world.target == 4, "the wish must last"
    world.run(2)
    assert world.target == 1
    assert world.n_changes == 2


def test_the_batch_counts_where_slots_are_plenty() -> None:
    """With slots for a hundred requests and a batch of sixteen, waiting requests are what a replica lacks room for."""

    def reports(world: World) -> list[Report]:
        each = 51 / world.running
        return [
            Report(f"r{n}", world.now, 100_000, 16 * 50, 50 * int(max(0, each - 16)), int(min(each, 16)),
                   int(max(0, each - 16)))
            for n in range(world.running)
        ]  # fmt: skip

    assert World(reports).run(60).target == 4  # 51 requests / (0.8 * 16)


@pytest.mark.parametrize("demand", [1.02 * FULL, 1.2 * FULL, 0.98 * FULL])
def test_a_steady_load_about_one_replica_does_not_flap(demand: float) -> None:
    world = World(spread(demand)).run(300)
    assert world.n_changes <= 1


def test_a_load_that_wavers_about_one_replica_changes_little() -> None:
    """Field case F4."""

    def reports(world: World) -> list[Report]:
        return spread(FULL * (1.1 if int(world.now) // 20 % 2 else 0.9))(world)

    assert World(reports).run(600).n_changes <= 2


def test_shrinking_leaves_something_to_spare() -> None:
    for demand, expected in ((0.9, 2), (0.7, 1)):
        world = World(spread(demand * FULL))
        world.target = world.running = 2
        assert world.run(100).target == expected


class Queue:
    """A service where each replica computes ``speed`` tokens a second and holds few requests when it keeps up.

    So two replicas look nearly idle under what overwhelms one.
    """

    def __init__(self, arrivals: float, speed: float = 400.0) -> None:
        self.arrivals, self.speed = arrivals, speed
        self.backlog = 0.0
        self.tokens: dict[str, float] = {}

    def __call__(self, world: World) -> list[Report]:
        self.backlog += self.arrivals
        done = min(self.backlog, self.speed * world.running)
        self.backlog -= done
        made = []
        for number in range(world.running):
            name = f"r{number}"
            self.tokens[name] = self.tokens.get(name, 0.0) + done / world.running
            busy = done / world.running / self.speed
            queued = int(self.backlog / world.running)
            reserved = int((900 if queued else 300) * busy)
            made.append(Report(name, world.now, N_SLOTS, reserved, queued, int(8 * busy), queued // 50,
                               int(self.tokens[name])))  # fmt: skip
        return made


def test_replicas_that_look_idle_under_what_one_could_not_do_stay() -> None:
    """Field case F4 as it happens: after scaling up the queue is gone, and so is the reason to have scaled up."""
    world = World(Queue(arrivals=420.0)).run(600)
    assert world.target == 2
    assert world.n_changes <= 2
    assert measure(world.reports(world), 0, SETTINGS).replicas / 0.8 + 0.25 < 1, "by its demand alone it would shrink"
    world.reports.arrivals = 100.0  # type: ignore[attr-defined]
    world.run(120)
    assert world.target == 1, "it is no reason to stay when the load is really gone"


def test_what_a_replica_could_do_is_forgotten() -> None:
    world = World(Queue(arrivals=420.0)).run(120)
    assert world.state.full_rate > 0
    world.run(round(world.state.full_at + FULL_RATE_MEMORY * SETTINGS.downscale_delay_s + 1 - world.now))
    assert world.state.full_rate == 0


def test_a_spike_shorter_than_the_delay_changes_nothing() -> None:
    world = World(spread(0)).run(10)
    world.reports = spread(8 * FULL)
    world.run(4)
    world.reports = spread(0)
    assert world.run(60).n_changes == 0


def test_growing_takes_the_smallest_and_shrinking_the_largest_wish() -> None:
    world = World(spread(0)).run(2)
    for demand in (6, 3, 6, 6, 6, 6):
        world.reports = spread(demand * FULL)
        world.tick()
    assert world.target == 3
    world.run(10)
    assert world.target == 6
    world.run(30)
    for second in range(61):
        world.reports = spread((3.5 if second == 30 else 0.5) * FULL)
        world.tick()
    assert world.target == 4


@pytest.mark.parametrize("interval_s", [0.1, 0.7, 3.0])
def test_delays_are_seconds_whatever_the_pace(interval_s: float) -> None:
    """Field case F3: delays counted in turns of the control loop grow with it."""
    state, now, target = State(), 0.0, 1
    while target == 1:
        now += interval_s
        report = Report("r", now, N_SLOTS, N_SLOTS, 3000)
        target, state, _ = decide(now, state, Facts(1, 1, 8, (report,)), SETTINGS)
    assert 5.0 - 1e-6 <= now - interval_s < 5.0 + interval_s + 1e-6


def test_bounds_hold() -> None:
    world = World(spread(100 * FULL), least=2, most=3).run(30)
    assert set(world.targets) == {2, 3}
    world.reports = spread(0)
    assert world.run(90).target == 2
    assert decide(0.0, State(), Facts(9, 2, 3), SETTINGS).replicas == 3
    assert decide(0.0, State(), Facts(1, 2, 3), SETTINGS).replicas == 2


def test_replicas_that_start_are_capacity_already_asked_for() -> None:
    """Loading takes ten minutes here; the queue meanwhile does not ask for the same replicas again and again."""
    world = World(spread(3 * FULL), start_s=600.0, most=100).run(500)
    assert world.running == 1
    assert world.target == 3


@given(st.lists(st.tuples(st.floats(0, 6), st.sampled_from([0.5, 1.0, 4.0]), st.booleans()), min_size=40, max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_change_comes_early_or_goes_too_far(ticks: list[tuple[float, float, bool]]) -> None:
    """Whatever demand, pace and silence do: bounds, delays, and no more than some wish of the delay asked for."""
    state, now, target, changed_at = State(), 0.0, 2, 0.0
    history: list[tuple[float, float]] = []
    for demand, pause_s, silent in ticks:
        now += pause_s
        slots = round(demand * FULL)
        report = Report("r") if silent else Report("r", now, N_SLOTS, min(slots, N_SLOTS), max(0, slots - N_SLOTS))
        history += [] if silent else [(now, demand)]
        after, state, _ = decide(now, state, Facts(target, 1, 5, (report,)), SETTINGS)
        assert 1 <= after <= 5
        if after != target:
            delay_s = SETTINGS.upscale_delay_s if after > target else SETTINGS.downscale_delay_s
            lately = [seen for at, seen in history if at > now - delay_s + 1e-6]
            idle = after < target and not any(lately)
            assert idle or now - changed_at >= delay_s - 1e-6
            if after > target:
                assert after - 1 < max(lately), "silence makes nothing grow"
            else:
                assert max(lately, default=0.0) < after
            target, changed_at = after, now
