"""Which replica has the most room: its last report, less what was sent and plus what ended since. Free of Ray.

The books are an estimate; a replica's own ledger has the last word.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from orca_core.types import Load

REPORT_DELAY_S: Final = 0.05
"""A request sent this close before a report was taken may not have reached the replica's ledger: it still counts."""

SUSPECT_S: Final = 10.0
"""A replica that did not answer is chosen last for so long, or until it reports again."""


@dataclass(frozen=True, slots=True)
class _Report:
    load: Load
    taken_at: float  # seconds, the replica's wall clock
    received_at: float  # seconds, our wall clock


@dataclass(frozen=True, slots=True)
class _Reservation:
    demand: int  # slots
    sent_at: float  # seconds, our wall clock


@dataclass(frozen=True, slots=True)
class _Ended:
    reservation: _Reservation
    at: float  # seconds, our wall clock


class HeadroomBook:
    """Chooses a replica and reserves the demand on it in one step, so that choices of one instant see each other.

    ``clock``: wall-clock seconds, comparable with the replicas' (a report says which requests it can know of by time).
    ``stale_after_s``: a report older than that is no longer believed; with none to believe, requests are spread by what
    this book itself has in flight. Not thread-safe: it lives on one event loop.
    """

    def __init__(
        self, clock: Callable[[], float], rng: random.Random | None = None, stale_after_s: float = 5.0
    ) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._stale_after_s = stale_after_s
        self._reports: dict[str, _Report] = {}
        self._suspects: dict[str, float] = {}
        # dependent calls of one Serve request share its internal id, hence a queue a key
        self._in_flight: dict[str, dict[str, deque[_Reservation]]] = {}
        # ended since the replica's last report, which may still count them
        self._ended: dict[str, list[_Ended]] = {}

    # ---- what is known

    def report(self, replica: str, load: Load, taken_at: float) -> None:
        """Take in a replica's report; one that is not newer than the last is ignored."""
        known = self._reports.get(replica)
        if known is not None and taken_at <= known.taken_at:
            return
        self._reports[replica] = _Report(load, taken_at, self._clock())
        self._ended[replica] = [ended for ended in self._ended.get(replica, ()) if ended.at > taken_at]
        self._suspects.pop(replica, None)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget the reports of replicas that are gone. Their reservations go when their requests end."""
        present = set(replicas)
        for known in (self._reports, self._suspects, self._ended):
            for replica in [name for name in known if name not in present]:
                del known[replica]

    def suspect(self, replica: str) -> None:
        """A replica did not answer: choose it last for a while."""
        self._suspects[replica] = self._clock()

    # ---- choosing

    def rank(self, replicas: Sequence[str], demand: int) -> list[str]:
        """Best first: not suspect, room for ``demand`` slots at once, largest free share; ties in random order.

        The share, not the number, so that replicas whose pools differ by a few blocks still take turns.
        """
        now = self._clock()
        largest = max((r.load.n_slots for r in self._reports.values() if self._believed(r, now)), default=0)
        order = list(replicas)
        self._rng.shuffle(order)

        def key(replica: str) -> tuple[bool, bool, float]:
            n_slots, headroom = self._estimate(replica, now, largest)
            share = headroom / n_slots if n_slots else float(headroom)
            suspect_since = self._suspects.get(replica)
            is_suspect = suspect_since is not None and now - suspect_since < SUSPECT_S
            return is_suspect, headroom < demand, -share

        return sorted(order, key=key)

    def reserve(self, request_id: str, replicas: Sequence[str], demand: int) -> str:
        """Choose the best of ``replicas`` (at least one) and book ``demand`` slots on it."""
        replica = self.rank(replicas, demand)[0]
        self.book(request_id, replica, demand)
        return replica

    def any_of(self, replicas: Sequence[str]) -> str:
        """One of ``replicas`` at random."""
        return self._rng.choice(replicas)

    def book(self, request_id: str, replica: str, demand: int) -> None:
        """Book ``demand`` slots on a replica that was chosen otherwise."""
        requests = self._in_flight.setdefault(replica, {})
        requests.setdefault(request_id, deque()).append(_Reservation(demand, self._clock()))

    def release(self, request_id: str, replica: str) -> None:
        """A request on that replica has ended, whichever way. Unknown ones are ignored."""
        requests = self._in_flight.get(replica)
        if requests is None or request_id not in requests:
            return
        reservation = requests[request_id].popleft()
        if replica in self._reports:
            self._ended.setdefault(replica, []).append(_Ended(reservation, self._clock()))
        if not requests[request_id]:
            del requests[request_id]
        if not requests:
            del self._in_flight[replica]

    # ---- facts

    def headroom(self, replica: str) -> int:
        """Estimated slots a new request could reserve at once on the replica."""
        return self._estimate(replica, self._clock(), 0)[1]

    def report_age_s(self, replica: str) -> float | None:
        """Seconds since the replica's last report arrived; ``None`` where there was none."""
        report = self._reports.get(replica)
        return None if report is None else max(0.0, self._clock() - report.received_at)

    @property
    def in_flight(self) -> int:
        """Requests booked and not released; zero when idle."""
        return sum(len(queue) for requests in self._in_flight.values() for queue in requests.values())

    def _believed(self, report: _Report, now: float) -> bool:
        return now - report.received_at <= self._stale_after_s

    def _estimate(self, replica: str, now: float, n_slots_if_unknown: int) -> tuple[int, int]:
        """(slots of the replica, headroom). Without a believable report: as if idle but for what we sent."""
        report = self._reports.get(replica)
        reservations = [r for queue in self._in_flight.get(replica, {}).values() for r in queue]
        if report is None or not self._believed(report, now):
            return n_slots_if_unknown, n_slots_if_unknown - sum(r.demand for r in reservations)
        seen_until = report.taken_at - REPORT_DELAY_S
        unseen = sum(r.demand for r in reservations if r.sent_at > seen_until)
        over = (ended.reservation for ended in self._ended.get(replica, ()))
        freed = sum(reservation.demand for reservation in over if reservation.sent_at <= seen_until)
        # what ended may have been gone from the report already: an idle replica has no more than all its slots
        return report.load.n_slots, min(report.load.headroom + freed, report.load.n_slots) - unseen
