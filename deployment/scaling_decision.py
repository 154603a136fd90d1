"""How many replicas there should be: a pure function of the reports, the time and what was decided before. Free of Ray.

Demand is measured in replicas' worth. A replica is full when its slots or its batch are, whichever is first: slots that
are reserved, queued or in line, over the slots of a replica; and the requests of the same, over its batch size. The
greater of the two, divided by the ratio aimed for, is the number wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from deployment.scaling_reports import Report, Seen, news

SPARE: Final = 0.25
"""Part of a replica that must be left over after shrinking: what is just enough now is too little in a moment."""

FULL_RATE_MEMORY: Final = 10.0
"""What a replica with a queue can do is remembered for that many times the downscale delay."""

_EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose. ``target_ratio``: share of all slots (and of all batches) that demand should take.

    ``upscale_delay_s`` / ``downscale_delay_s``: seconds a wish must last. ``stale_after_s``: seconds after which a
    replica that has not reported is no longer believed. ``max_batch_size``: requests in one iteration of a replica.
    """

    target_ratio: float
    upscale_delay_s: float
    downscale_delay_s: float
    stale_after_s: float
    max_batch_size: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at one instant. ``target``: replicas asked for, those that still start included.

    ``unplaced_requests``: requests that wait for any replica to run at all.
    """

    target: int
    min_replicas: int
    max_replicas: int
    reports: tuple[Report, ...] = ()
    unplaced_requests: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What one decision hands to the next. Times are seconds on our clock.

    ``up_since``, ``up_least``: since when more replicas were wanted without a break, and the fewest of these wishes;
    ``down_since``, ``down_most``: the same for fewer. ``idle_since``: since when nobody has wanted anything.
    ``blind_since``: since when a replica has not been heard of.
    ``full_rate``: tokens a second of a replica that had a queue, seen last at ``full_at``.
    """

    seen: Mapping[str, Seen] = field(default_factory=dict)
    up_since: float | None = None
    up_least: int = 0
    down_since: float | None = None
    down_most: int = 0
    idle_since: float | None = None
    blind_since: float | None = None
    full_rate: float = 0.0
    full_at: float = -math.inf


class Depth(NamedTuple):
    """Demand. ``replicas``: its worth in replicas that are entirely full."""

    reserved_slots: int
    queued_slots: int
    line_slots: int
    requests: int
    replicas: float

    @property
    def nothing(self) -> bool:
        """Nobody wants anything."""
        return not (self.reserved_slots or self.queued_slots or self.line_slots or self.requests)

    def __str__(self) -> str:
        slots = f"{self.reserved_slots} reserved, {self.queued_slots} queued, {self.line_slots} slots in line"
        return f"{slots}, {self.requests} requests: {self.replicas:.2f} replicas full"


class Decision(NamedTuple):
    """What ``decide`` gives. ``reason``: one line, for the log and for people."""

    replicas: int
    state: State
    reason: str


def decide(now: float, state: State, facts: Facts, settings: Settings) -> Decision:
    """How many replicas there should be from now on. ``now``: seconds, on a clock that does not jump.

    Growing takes the smallest, shrinking the largest wish of the delay before it. A replica that does not report adds
    nothing, and for a downscale delay it keeps the number from shrinking. Among what holds against shrinking is the
    token rate: a number of replicas that were full at a lower rate would soon be full again. A service in which nobody
    has wanted anything for the delay shrinks to its least; work that came and went between two reports is a want, and
    while no replica runs yet, nobody could have had one.
    """
    state = _take_in(now, state, facts, settings)
    fresh = [s for s in state.seen.values() if now - s.received_at <= settings.stale_after_s]
    depth = measure([s.report for s in fresh], facts.unplaced_requests, settings)
    blind = len(fresh) < max(1, len(facts.reports)) and facts.target > 0
    state = replace(state, blind_since=(state.blind_since if state.blind_since is not None else now) if blind else None)
    patience_s = max(settings.downscale_delay_s, settings.stale_after_s)
    starts = facts.target > 0 and not facts.reports
    unsure = starts or (state.blind_since is not None and now - state.blind_since < patience_s)
    worked = any(s.worked and s.received_at == now for s in fresh)
    more, fewer = _wishes(depth, worked, sum(s.rate for s in fresh), state, facts, settings)
    state = _count_up(now, state, more, facts.target)
    state = _count_down(now, state, facts.target if unsure else fewer, facts.target)
    state = _count_idle(now, state, depth.nothing and not worked and not unsure)
    if state.up_since is not None and now - state.up_since + _EPSILON >= settings.upscale_delay_s:
        return _changed(state, facts.target, state.up_least, depth, now - state.up_since)
    least = max(facts.min_replicas, min(facts.target - 1, 1))  # Serve goes to zero from one only
    idle_s = 0.0 if state.idle_since is None else now - state.idle_since
    if state.idle_since is not None and idle_s + _EPSILON >= settings.downscale_delay_s and least < facts.target:
        return _changed(state, facts.target, least, depth, idle_s)
    if state.down_since is not None and now - state.down_since + _EPSILON >= settings.downscale_delay_s:
        return _changed(state, facts.target, max(state.down_most, least), depth, now - state.down_since)
    in_bounds = min(max(facts.target, facts.min_replicas), facts.max_replicas)
    held = ", held: not every replica reports" if unsure and fewer < facts.target else ""
    return Decision(in_bounds, state, f"{in_bounds} replicas: {depth}{held}")


def measure(reports: list[Report], unplaced_requests: int, settings: Settings) -> Depth:
    """The demand that reports tell of. What waits before the replicas is known to all of them and counted once."""
    reserved, queued = sum(r.reserved_slots for r in reports), sum(r.queued_slots for r in reports)
    line_slots = max((r.line_slots for r in reports), default=0)
    line_requests = max((r.line_requests for r in reports), default=0)
    requests = sum(r.running + r.waiting for r in reports) + line_requests + unplaced_requests
    slots_each = sum(r.n_slots for r in reports) / len(reports) if reports else 0.0
    by_slots = (reserved + queued + line_slots) / slots_each if slots_each else 0.0
    return Depth(reserved, queued, line_slots, requests, max(by_slots, requests / settings.max_batch_size))


def _take_in(now: float, state: State, facts: Facts, settings: Settings) -> State:
    """With the news among the reports; replicas that are gone are forgotten."""
    seen: dict[str, Seen] = {}
    full_rate, full_at = state.full_rate, state.full_at
    for report in facts.reports:
        latest = news(state.seen.get(report.replica), report, now)
        if latest is not None:
            seen[report.replica] = latest
            if latest.received_at == now and latest.full_rate > 0:
                full_rate, full_at = max(full_rate, latest.full_rate), now
    if now - full_at > FULL_RATE_MEMORY * settings.downscale_delay_s:
        full_rate = 0.0
    return replace(state, seen=seen, full_rate=full_rate, full_at=full_at)


def _wishes(depth: Depth, worked: bool, rate: float, state: State, facts: Facts, settings: Settings) -> tuple[int, int]:
    """(replicas to grow to, replicas to shrink to), within the bounds. The second is the greater or both are equal."""
    needed = depth.replicas / settings.target_ratio
    more = math.ceil(needed - _EPSILON)
    if depth.nothing and not worked:
        fewer = 0
    else:
        fewer = math.ceil(needed + SPARE - _EPSILON)
        if state.full_rate > 0:
            fewer = max(fewer, math.ceil(rate / state.full_rate + SPARE - _EPSILON))
    low, high = facts.min_replicas, facts.max_replicas
    return min(max(more, low), high), min(max(fewer, low), high)


def _count_up(now: float, state: State, wanted: int, target: int) -> State:
    if wanted <= target:
        return replace(state, up_since=None)
    if state.up_since is None:
        return replace(state, up_since=now, up_least=wanted)
    return replace(state, up_least=min(state.up_least, wanted))


def _count_down(now: float, state: State, wanted: int, target: int) -> State:
    if wanted >= target:
        return replace(state, down_since=None)
    if state.down_since is None:
        return replace(state, down_since=now, down_most=wanted)
    return replace(state, down_most=max(state.down_most, wanted))


def _count_idle(now: float, state: State, idle: bool) -> State:
    return replace(state, idle_since=(now if state.idle_since is None else state.idle_since) if idle else None)


def _changed(state: State, before: int, after: int, depth: Depth, lasted_s: float) -> Decision:
    reason = f"{before} -> {after} replicas: {depth}, for {lasted_s:.1f} s"
    return Decision(after, replace(state, up_since=None, down_since=None), reason)
