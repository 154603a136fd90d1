"""How often streams are written to: at once while there is CPU to be had, at intervals while there is not. Free of Ray.

A message costs ingress, HAProxy, replica and client 100 to 300 microseconds of CPU together, whatever is in it. A
machine that has not got these gives its readers more if the tokens of a few milliseconds share a message: where the
event loop wants its CPU nearly all the time, and where the CPUs are full and messages take a good part of them, as
beside a model that computes on the same CPUs. The first token never waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.1
"""Seconds between two looks at how busy the event loop is."""

BUSY: Final = 0.85
"""Part of the time for which the event loop wants a CPU, above which messages are made fewer."""

EASY: Final = 0.6
"""The same, below which they are made more again."""

FULL: Final = 0.8
"""Part of the machine's CPUs in use, above which a model on them loses what messages take."""

ROOM: Final = 0.6
"""The same, below which it does not."""

MANY: Final = 100.0
"""Tokens a second for each CPU, above which a message for each takes a good part of the CPUs; half as many do not."""

_STEPS: Final = 4  # a quarter of the longest interval is the shortest
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a CPU, nanoseconds ready to run without one (Linux, Documentation/scheduler/sched-stats.rst)."""


_STAT: Final = Path("/proc/stat")


def cpu_times() -> tuple[float, float]:
    """What the machine's CPUs have been busy for, and all time they had, in ticks; both 0 where that is not known."""
    try:
        user, nice, system, idle, iowait, *rest = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0, 0.0
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + iowait


def wanted_s() -> float:
    """Seconds for which the calling thread has wanted a CPU: had one, or, where the kernel says so, waited for one."""
    try:
        ran, waited, *_ = _SCHEDSTAT.read_text().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


class Pace:
    """``longest_s``: seconds between two messages of a stream at most; 0 = every token leaves at once, always.

    ``clock``: seconds. ``wanted``: seconds for which the event loop's thread has wanted a CPU; ``cpus``: see
    ``cpu_times``; all since whenever. ``n_cpus``: of the machine.
    """

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float],
        wanted: Callable[[], float] = wanted_s,
        cpus: Callable[[], tuple[float, float]] = cpu_times,
        n_cpus: int | None = None,
    ) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._wanted = wanted
        self._cpus = cpus
        self._many = MANY * (n_cpus or os.cpu_count() or 1)
        self._interval_s = 0.0
        self._n_tokens = 0
        self._looked_at = clock()
        self._last: tuple[float, float, float] | None = None  # nothing is known of the time before the first look

    def count(self, n_tokens: int) -> None:
        """So many tokens have come."""
        self._n_tokens += n_tokens

    def interval_s(self) -> float:
        """Seconds that should lie between two messages of a stream now. Cheap; to be asked while there is traffic."""
        now = self._clock()
        if self._longest_s and now - self._looked_at >= LOOK_S:
            self._look(now)
        return self._interval_s

    def _look(self, now: float) -> None:
        elapsed_s, n_tokens = now - self._looked_at, self._n_tokens
        latest = self._wanted(), *self._cpus()
        if self._last is not None:
            wanted, busy, total = (after - before for after, before in zip(latest, self._last, strict=True))
            self._adapt(wanted / elapsed_s, busy / total if total > 0 else 0.0, n_tokens / elapsed_s)
        self._looked_at, self._last, self._n_tokens = now, latest, 0

    def _adapt(self, share: float, used: float, rate: float) -> None:
        """``share``: of the time for which the event loop wanted a CPU; ``used``: of the CPUs; ``rate``: tokens/s."""
        shortest_s = self._longest_s / _STEPS
        if used > FULL and rate > self._many:
            self._interval_s = self._longest_s
        elif share > BUSY:
            self._interval_s = min(self._longest_s, max(shortest_s, 2 * self._interval_s))
        elif share < EASY and (used < ROOM or rate < self._many / 2):
            self._interval_s = self._interval_s / 2 if self._interval_s > shortest_s else 0.0
