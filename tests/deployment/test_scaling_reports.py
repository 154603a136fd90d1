"""What the number of replicas is decided from, and what is said of it: reports, their sum, the reason."""

from __future__ import annotations

import pytest

from deployment.scaling_decision import measure
from deployment.scaling_reports import FULL_STRETCH_S, Report, Seen, news, report_from_stats, scaling_stats
from orca_core.types import Load
from tests.deployment.scaling_world import FULL, N_SLOTS, SETTINGS, World, spread


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
