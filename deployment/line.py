"""The waiting line of an ingress: first come, first served, bounded, honest about how long it takes. Free of Ray."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from deployment.entry import Entry
from orca_core.errors import OverloadedError

WINDOW_S: Final = 30.0
"""Seconds, of those in which somebody waited, over which the release of slots is measured."""

FORGET_S: Final = 300.0
"""What was measured longer ago says nothing: the requests may be of another kind by now."""

RETRY_RANGE_S: Final = (0.5, 60.0)
UNKNOWN_RETRY_S: Final = 1.0
"""When to come back if nothing has been measured yet."""

LOOK_AHEAD: Final = 64
"""How many behind a head that does not fit are looked at, to find some that do."""

_FEWEST_RELEASES: Final = 3


class SlotRate:
    """Slots that come free in a second while somebody waits for them: what the line moves at. ``clock``: seconds.

    Time in which nobody waits is left out: slots that nobody wants don't say how fast they could have come.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waited_before_s = 0.0  # until `_since`
        self._since: float | None = None  # somebody has been waiting from then on
        self._releases: deque[tuple[float, float, int]] = deque()  # (when, seconds waited by then, slots)
        self._start_s = 0.0  # seconds waited at the last release that was forgotten

    def someone_waits(self, waits: bool) -> None:
        """Say so whenever it may have changed."""
        if waits and self._since is None:
            self._since = self._clock()
        elif not waits and self._since is not None:
            self._waited_before_s, self._since = self._waited_s(), None

    def release(self, slots: int) -> None:
        """Slots have come free."""
        if self._since is not None:
            self._releases.append((self._clock(), self._waited_s(), slots))

    def per_second(self) -> float | None:
        """``None`` while too little has been seen."""
        now, waited = self._clock(), self._waited_s()
        while self._releases and self._is_past(self._releases[0], now, waited):
            self._start_s = self._releases.popleft()[1]
        span = waited - self._start_s
        if len(self._releases) < _FEWEST_RELEASES or span <= 0:
            return None
        return sum(slots for _, _, slots in self._releases) / span

    def _is_past(self, release: tuple[float, float, int], now: float, waited: float) -> bool:
        """Few slow ones are kept for longer than many quick ones."""
        out_of_window = release[1] < waited - WINDOW_S and len(self._releases) > _FEWEST_RELEASES
        return out_of_window or release[0] < now - FORGET_S

    def _waited_s(self) -> float:
        return self._waited_before_s + (0.0 if self._since is None else self._clock() - self._since)


class WaitingLine:
    """Entries in the order of their numbers. ``max_requests``, ``max_slots``: bounds of its length.

    Whoever comes back (turned down by a replica after all, or its replica lost) goes to its old place, in front of
    everybody who came later. What is guaranteed (``judge``):

    - Who has waited, and was not refused when it was judged, is promised a place. It is not refused for the length of
      the line any more, and while it is on its way to a replica its place counts as taken.
    - Who was sent at once has been promised nothing. If it is turned down and nobody else has room, it is judged then,
      as if it had just come. So the line is never longer than its bounds, but for what follows.
    - Who was accepted by a replica is not judged again, whatever becomes of that replica: a stream that has begun waits
      for the next one until its deadline, on top of the bounds.
    - Everybody else is refused as soon as it is known that its turn would come too late for its deadline.
    """

    def __init__(self, max_requests: int, max_slots: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_slots = max_slots
        self._clock = clock
        self._waiting: dict[int, Entry] = {}
        self._order: list[int] = []  # a heap; numbers of entries that have left are skipped when they come up
        self._stands = False
        self.slots = 0
        self.rate = SlotRate(clock)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, entry: Entry) -> bool:
        return entry.number in self._waiting

    def put(self, entry: Entry) -> None:
        """Put an entry where its number belongs."""
        self._waiting[entry.number] = entry
        self.slots += entry.demand
        heapq.heappush(self._order, entry.number)
        self.rate.someone_waits(not self._stands)

    def stand_still(self, stands: bool) -> None:
        """Whether there is nobody to send anything to: time in which that is so tells nothing of how fast it moves."""
        if stands != self._stands:
            self._stands = stands
            self.rate.someone_waits(bool(self._waiting) and not stands)

    def head(self) -> Entry | None:
        """Whose turn it is."""
        while self._order and self._order[0] not in self._waiting:
            heapq.heappop(self._order)
        return self._waiting[self._order[0]] if self._order else None

    def behind_head(self) -> list[Entry]:
        """Some of those who come next, in order: the line may be long."""
        return [self._waiting[number] for number in heapq.nsmallest(1 + LOOK_AHEAD, self._waiting)[1:]]

    def remove(self, entry: Entry) -> None:
        """An entry leaves, whichever way. One that is not here is no error."""
        if self._waiting.pop(entry.number, None) is not None:
            self.slots -= entry.demand
            self.rate.someone_waits(bool(self._waiting) and not self._stands)

    def expired(self) -> list[Entry]:
        """Entries whose deadline has passed."""
        now = self._clock()
        return [entry for entry in self._waiting.values() if entry.deadline <= now]

    def judge(self, entry: Entry, iteration_s: float, away: Sequence[Entry] = (), start_s: float | None = None) -> None:
        """Whether an entry that waits may stay, and has a promised place from now on; whoever may not has left.

        Raises ``OverloadedError`` where the line is too long, or would not get to the entry before its deadline.
        ``iteration_s``: seconds it takes to answer once it is its turn. ``away``: who is on its way to a replica.
        ``start_s``: seconds until there is any replica, where that is known and there is none.
        """
        wait_s = _sum(self.wait_s(entry), start_s)
        kept = [each.demand for each in away if each.is_promised]
        if not entry.is_promised and len(self) + len(kept) > self._max_requests:
            reason = "too many requests are waiting"
        elif not entry.is_promised and self.slots + sum(kept) > self._max_slots:
            reason = "the waiting requests need too many slots"
        elif wait_s is not None and self._clock() + wait_s + iteration_s > entry.deadline:
            reason = f"its turn would come in about {wait_s:.0f} s, after its deadline"
        else:
            entry.is_promised = True
            return
        whole_s = _sum(self.wait_s(), start_s)
        self.remove(entry)
        shortest, longest = RETRY_RANGE_S
        delay_s = UNKNOWN_RETRY_S if whole_s is None else min(longest, max(shortest, whole_s))
        raise OverloadedError(reason, delay_s)

    def wait_s(self, entry: Entry | None = None) -> float | None:
        """Seconds until all who wait now have had their turn, at the rate measured; ``None``: nothing measured.

        ``entry``: only it and those in front of it.
        """
        rate = self.rate.per_second()
        if not rate:
            return None
        if entry is None:
            return self.slots / rate
        return sum(each.demand for number, each in self._waiting.items() if number <= entry.number) / rate


def _sum(wait_s: float | None, start_s: float | None) -> float | None:
    """What is known of two waits, one after the other."""
    known = [each for each in (wait_s, start_s) if each is not None]
    return sum(known) if known else None
