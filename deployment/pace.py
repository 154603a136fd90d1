"""How often streams are written to: at once while there is CPU to be had, at intervals while there is not. Free of Ray.

A message costs an ingress and its client some 50 microseconds of CPU, whatever is in it. A machine that has not got
these gives its readers more if the tokens of a few milliseconds share a message. The first token never waits.
"""

from __future__ import annotations

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

_STEPS: Final = 4  # a quarter of the longest interval is the shortest
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a CPU, nanoseconds ready to run without one (Linux, Documentation/scheduler/sched-stats.rst)."""


def wanted_s() -> float:
    """Seconds for which the calling thread has wanted a CPU: had one, or, where the kernel says so, waited for one."""
    try:
        ran, waited, *_ = _SCHEDSTAT.read_text().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


class Pace:
    """``longest_s``: seconds between two messages of a stream at most; 0 = every token leaves at once, always.

    ``clock``: seconds. ``wanted``: seconds for which the event loop's thread has wanted a CPU; both since whenever.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float], wanted: Callable[[], float] = wanted_s) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._wanted = wanted
        self._interval_s = 0.0
        self._looked_at = clock()
        self._wanted_then: float | None = None  # nothing is known of the time before the first look

    def interval_s(self) -> float:
        """Seconds that should lie between two messages of a stream now. Cheap; to be asked while there is traffic."""
        now = self._clock()
        if self._longest_s and now - self._looked_at >= LOOK_S:
            wanted = self._wanted()
            if self._wanted_then is not None:
                self._adapt((wanted - self._wanted_then) / (now - self._looked_at))
            self._looked_at, self._wanted_then = now, wanted
        return self._interval_s

    def _adapt(self, share: float) -> None:
        shortest_s = self._longest_s / _STEPS
        if share > BUSY:
            self._interval_s = min(self._longest_s, max(shortest_s, 2 * self._interval_s))
        elif share < EASY:
            self._interval_s = self._interval_s / 2 if self._interval_s > shortest_s else 0.0
