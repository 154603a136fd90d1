"""What a replica tells the autoscaler, and what is made of its reports one after the other. Free of Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orca_core.types import Load

RATE_SMOOTHING_S: Final = 10.0
"""Time constant of the token rates, seconds: a prompt counts all at once when it is computed."""

FULL_STRETCH_S: Final = 4.0
"""A replica must have had a queue for so long before its rate tells what it can do."""


@dataclass(frozen=True, slots=True)
class Report:
    """A running replica. ``taken_at``: seconds on its own clock; ``None`` = it has not reported yet.

    ``tokens``: computed since its start. ``line_slots`` / ``line_requests``: what waits before any replica, as this one
    was told.
    """

    replica: str
    taken_at: float | None = None
    n_slots: int = 0
    reserved_slots: int = 0
    queued_slots: int = 0
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    line_slots: int = 0
    line_requests: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The last news of a replica. ``received_at``: seconds on our clock. ``rate``: its tokens a second, smoothed.

    ``full_from``: time on its clock and tokens when its present queue was first reported; ``None`` = it has none.
    ``worked``: it has computed something since the report before, though it may have nothing to do now.
    """

    report: Report
    received_at: float
    rate: float = 0.0
    full_from: tuple[float, int] | None = None
    worked: bool = False

    @property
    def full_rate(self) -> float:
        """Tokens a second of a replica that has a queue; 0 where it has none, or not for long enough."""
        if self.full_from is None or self.report.taken_at is None:
            return 0.0
        lasted_s = self.report.taken_at - self.full_from[0]
        return (self.report.tokens - self.full_from[1]) / lasted_s if lasted_s >= FULL_STRETCH_S else 0.0


def news(last: Seen | None, report: Report, now: float) -> Seen | None:
    """What is known after a report; one that is none, or that was there before, changes nothing."""
    if report.taken_at is None or (last is not None and report.taken_at == last.report.taken_at):
        return last
    full_from = None
    if report.waiting:
        full_from = last.full_from if last is not None else None
        full_from = full_from or (report.taken_at, report.tokens)
    return Seen(report, now, _rate(last, report), full_from, last is not None and report.tokens > last.report.tokens)


def _rate(last: Seen | None, report: Report) -> float:
    """Tokens a second, smoothed over the time between two reports on the replica's own clock."""
    if last is None or report.taken_at is None or last.report.taken_at is None:
        return 0.0
    elapsed_s = report.taken_at - last.report.taken_at
    if elapsed_s <= 0 or report.tokens < last.report.tokens:
        return last.rate
    weight = 1.0 - math.exp(-elapsed_s / RATE_SMOOTHING_S)
    return last.rate + weight * ((report.tokens - last.report.tokens) / elapsed_s - last.rate)


def scaling_stats(load: Load, line_slots: int, line_requests: int) -> dict[str, float]:
    """A replica's load for Serve's ``record_autoscaling_stats``."""
    names = ("n_slots", "reserved_slots", "queued_slots", "running", "waiting")
    stats: dict[str, float] = {f"orca_{name}": getattr(load, name) for name in names}
    stats["orca_tokens"] = load.prompt_tokens - load.cached_prompt_tokens + load.generated_tokens
    return stats | {"orca_line_slots": line_slots, "orca_line_requests": line_requests}


def report_from_stats(replica: str, taken_at: float, stats: Mapping[str, float]) -> Report:
    """The inverse of ``scaling_stats``; names it does not know are left out."""
    known = {
        name: int(value) for name in Report.__dataclass_fields__ if (value := stats.get(f"orca_{name}")) is not None
    }
    return Report(replica, taken_at if known else None, **known)
