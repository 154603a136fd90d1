"""How much iteration-level scheduling can gain on a workload: schedules in virtual time, at measured costs.

An iteration is worth what one with as many rows took in the same run. Out of that come three times for a workload:
request-level scheduling, iteration-level scheduling in arrival order (Orca, Algorithm 1), and the ideal, in which no
place is ever empty. Nothing here runs a model: these are pure functions of shapes and costs.

What is left out: an increment costs a little more the longer its context is, and costs are medians over all contexts
that occurred.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deployment.bench.workloads import Shape


class IterationCost:
    """Seconds of an iteration by its rows: medians of what was measured, linear between them.

    Beyond them the slope from the fewest to the most rows goes on: that of two neighbours would be mostly noise.
    ``measured``: (rows, seconds), in any order, at least one.
    """

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        by_rows: dict[int, list[float]] = {}
        for n_rows, seconds in measured:
            by_rows.setdefault(n_rows, []).append(seconds)
        self.rows = sorted(by_rows)
        self.seconds = [statistics.median(by_rows[n_rows]) for n_rows in self.rows]
        self.counts = [len(by_rows[n_rows]) for n_rows in self.rows]

    def __call__(self, n_rows: int) -> float:
        """Seconds of an iteration of ``n_rows``."""
        if len(self.rows) == 1:
            return self.seconds[0]
        high = bisect_left(self.rows, n_rows)
        low, high = (high - 1, high) if 0 < high < len(self.rows) else (0, len(self.rows) - 1)
        x, y = self.rows, self.seconds
        nearest = low if n_rows < x[high] else high
        return y[nearest] + (y[high] - y[low]) * (n_rows - x[nearest]) / (x[high] - x[low])

    def total(self, rows: Iterable[int]) -> float:
        """Seconds of iterations one after the other."""
        return sum(self(n_rows) for n_rows in rows)


@dataclass(slots=True)
class _Member:
    uncomputed: int
    left: int
    initiated: bool = False


def rows_by_iteration(shapes: Sequence[Shape], max_batch_size: int, max_batch_tokens: int, *, joins: bool) -> list[int]:
    """Rows of each iteration of a schedule in arrival order, all requests there from the start.

    ``joins``: iteration-level (an ended request's place is taken in the next iteration, as far as rows are left for
    the newcomer's prompt); otherwise request-level (a batch is formed when nobody runs). Slots are no limit.
    """
    waiting = deque(shapes)
    running: list[_Member] = []
    rows: list[int] = []
    while waiting or running:
        budget = max_batch_tokens - sum(member.initiated for member in running)
        for member in running:
            if not member.initiated:
                budget -= min(member.uncomputed, budget)
        forming = not running
        while waiting and len(running) < max_batch_size and (budget > 0 if joins else forming):
            shape = waiting.popleft()
            running.append(_Member(shape.n_prompt_tokens, shape.new_tokens))
            budget -= min(shape.n_prompt_tokens, budget)
        rows.append(_advance(running, max_batch_tokens))
        running = [member for member in running if member.left]
    return rows


def _advance(running: Sequence[_Member], max_batch_tokens: int) -> int:
    """One iteration: increments first, then prompts with the rows that are left. Returns the rows it had."""
    budget = max_batch_tokens
    for member in sorted(running, key=lambda member: not member.initiated):  # stable: arrival order in each group
        n_rows = min(member.uncomputed, budget)
        budget -= n_rows
        member.uncomputed -= n_rows
        if n_rows and not member.uncomputed:
            member.initiated, member.uncomputed, member.left = True, 1, member.left - 1
    return max_batch_tokens - budget


def packed_rows(shapes: Sequence[Shape], max_batch_size: int, n_together: int = 1) -> list[int]:
    """Rows of each iteration if no place were ever empty, whatever the order: no schedule needs fewer iterations.

    Every new token takes a place in one iteration; there are ``max_batch_size`` places, and the longest request needs
    an iteration for each of its tokens. Prompts are spread over the fullest iterations, ``n_together`` in each as long
    as there are iterations; the row limit is ignored.
    """
    places = sum(shape.new_tokens for shape in shapes)
    n_iterations = max(-(-places // max_batch_size), *(shape.new_tokens for shape in shapes))
    rows = [1] * n_iterations
    if max_batch_size > 1:
        full, rest = divmod(places - n_iterations, max_batch_size - 1)
        rows[:full] = [max_batch_size] * full
        if rest:
            rows[full] += rest
    for index, shape in enumerate(sorted(shapes, key=lambda shape: -shape.n_prompt_tokens)):
        rows[index // n_together % n_iterations] += shape.n_prompt_tokens - 1
    return rows


@dataclass(frozen=True, slots=True)
class Bound:
    """Virtual seconds of a workload. Ratios say how many times as many requests a second as ``static_s`` gives."""

    static_s: float
    arrival_order_s: float
    ideal_s: float

    @property
    def ideal(self) -> float:
        """What no schedule can exceed."""
        return self.static_s / self.ideal_s

    @property
    def arrival_order(self) -> float:
        """What Algorithm 1 can reach: its last requests run with places empty."""
        return self.static_s / self.arrival_order_s


def bound_of(shapes: Sequence[Shape], max_batch_size: int, max_batch_tokens: int, cost: IterationCost) -> Bound:
    """The three schedules at that cost; the ideal one may compute its prompts apart or together, as is cheaper."""
    static, arrival_order = (
        cost.total(rows_by_iteration(shapes, max_batch_size, max_batch_tokens, joins=joins)) for joins in (False, True)
    )
    packed = (packed_rows(shapes, max_batch_size, n) for n in range(1, max_batch_size + 1))
    return Bound(static, arrival_order, min(cost.total(rows) for rows in packed))
