"""The number of replicas in virtual time: steps, steady loads, silence. No clock, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.scaling_decision import FULL_RATE_MEMORY, Facts, Settings, State, decide, measure
from deployment.scaling_reports import FULL_STRETCH_S, Report, Seen, news, report_from_stats, scaling_stats
from orca_core.types import Load

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


def test_a_short_queue_tells_nothing_of_what_a_replica_can_do() -> None:
    first = news(None, Report("r", 0.0, waiting=1, tokens=0), 0.0)
    second = news(first, Report("r", FULL_STRETCH_S - 0.1, waiting=1, tokens=900), 4.0)
    third = news(second, Report("r", FULL_STRETCH_S, waiting=1, tokens=1000), 5.0)
    assert isinstance(second, Seen)
    assert isinstance(third, Seen)
    assert (second.full_rate, third.full_rate) == (0.0, 1000 / FULL_STRETCH_S)
    fourth = news(third, Report("r", 6.0, waiting=0, tokens=1000), 6.0)
    assert isinstance(fourth, Seen)
    assert fourth.full_rate == 0.0


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


# ---- silence


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


def test_an_idle_service_goes_to_the_least() -> None:
    world = World(spread(0), least=1)
    world.target = world.running = 5
    assert world.run(61).target == 1
    world = World(spread(0), least=0)
    world.target = world.running = 1
    assert world.run(61).target == 0


# ---- measuring and telling


def test_the_line_is_counted_once_however_many_know_of_it() -> None:
    reports = [Report(f"r{n}", 1.0, N_SLOTS, 100, 0, 2, 0, line_slots=500, line_requests=4) for n in range(3)]
    reports.append(Report("new", 1.0, N_SLOTS))
    depth = measure(reports, 0, SETTINGS)
    assert (depth.reserved_slots, depth.line_slots, depth.requests) == (300, 500, 10)
    assert depth.replicas == pytest.approx(0.8)


def test_the_reason_says_what_was_seen() -> None:
    world = World(spread(4 * FULL)).run(20)
    (reason,) = world.reasons
    assert (
        reason
        == "1 -> 4 replicas: 1000 reserved, 2200 queued, 0 slots in line, 32 requests: 3.20 replicas full, for 5.0 s"
    )


def test_a_load_travels_as_numbers() -> None:
    load = Load(n_slots=9, reserved_slots=8, used_slots=7, queued_slots=6, waiting=5, running=4, prompt_tokens=10,
                cached_prompt_tokens=7, generated_tokens=2)  # fmt: skip
    stats = scaling_stats(load, line_slots=11, line_requests=1)
    assert all(isinstance(value, int | float) for value in stats.values())
    assert stats["orca_tokens"] == 5, "what was found in the cache was not computed"
    assert report_from_stats("r", 1.5, stats) == Report("r", 1.5, 9, 8, 6, 4, 5, 5, 11, 1)
    assert report_from_stats("r", 1.5, {"other": 1.0}) == Report("r")


# ---- to zero


def to_zero(reports: Callable[[World], list[Report]], **given: float) -> World:
    return World(reports, least=0, **given)  # type: ignore[arg-type]


def idle(world: World) -> list[Report]:
    return [Report(f"r{n}", world.now, N_SLOTS, tokens=7) for n in range(world.running)]


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
