"""Which replica has the most room: what it said last, less what it cannot have known of. Free of Ray.

The books are an estimate; a replica's own ledger has the last word.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deployment.parcels import Standing
from orca_core.types import Load

SUSPECT_S: Final = 10.0
"""A replica that did not answer is chosen last for so long, or until it says how it stands."""

LESS_FREE: Final = 0.25
"""By how much a replica's free share may be below the best one's while it is chosen for what its cache may hold."""

_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class _Booked:
    """One request that was sent. ``number``: under which the replica has accepted it, once that is known."""

    replica: str
    demand: int
    number: int | None = None


@dataclass(slots=True)
class _Known:
    """A replica. ``unseen``: what was sent to it and is not in the load it reported.

    ``in_flight_slots``, ``in_flight``: all that was sent to it and has not ended. ``others``: what others had there,
    slots and requests, when all replicas were last asked; ``None`` = it was not asked yet. ``asked_at``: when that was.
    ``progress_at``: until when it was known to make progress, on its own clock.
    """

    standing: Standing | None = None
    received_at: float = 0.0
    unseen: dict[str, _Booked] = field(default_factory=dict)
    in_flight_slots: int = 0
    in_flight: int = 0
    others: tuple[int, int] | None = None
    asked_at: float = 0.0
    refused: bool = False
    suspect_since: float | None = None
    iteration_s: float = 0.0
    progress_at: float = 0.0


class HeadroomBook:
    """Chooses a replica and books the demand on it in one step, so that choices of one instant see each other.

    A report says how many requests the replica had accepted from us, so what it does not know of is exact, whatever
    the clocks of the machines say. ``clock``: seconds. ``max_batch_size``: requests a replica runs together.
    ``stale_after_s``: a report older than that is not believed; requests are then spread by what is in flight. Not
    thread-safe: it lives on one event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        max_batch_size: int,
        rng: random.Random | None = None,
        stale_after_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._max_batch_size = max_batch_size
        self._rng = rng or random.Random()
        self._stale_after_s = stale_after_s
        self._known: dict[str, _Known] = {}
        self._booked: dict[str, _Booked] = {}

    # ---- what is known

    def report(self, replica: str, standing: Standing) -> None:
        """Take in how a replica stands; what is not newer than the last is ignored."""
        known = self._known.setdefault(replica, _Known())
        before, now = known.standing, self._clock()
        if before is not None and standing.at <= before.at:
            return
        if before is not None and before.load.running and standing.load.iterations > before.load.iterations:
            each = (standing.at - before.at) / (standing.load.iterations - before.load.iterations)
            known.iteration_s += (each - known.iteration_s) * (_SMOOTHING if known.iteration_s else 1.0)
        if before is None or not standing.load.running or standing.load.iterations > before.load.iterations:
            known.progress_at = standing.at
        known.standing, known.received_at = standing, now
        known.refused, known.suspect_since = False, None
        for attempt_id in [name for name, booked in known.unseen.items() if _is_seen(booked, standing)]:
            del known.unseen[attempt_id]

    def survey(self, loads: Mapping[str, Load], asked_at: float) -> None:
        """How all replicas stood at one moment, soon after ``asked_at``: what of it is not ours belongs to others.

        See ``best``. The answers are handed over together: a report may have come since that is newer.
        """
        for replica, load in loads.items():
            known = self._known.setdefault(replica, _Known())
            slots = load.reserved_slots + load.queued_slots - known.in_flight_slots
            known.others = max(0, slots), max(0, load.running + load.waiting - known.in_flight)
            known.asked_at = asked_at

    def forget(self, replica: str) -> None:
        """A replica is gone, with all that was sent to it."""
        self._known.pop(replica, None)
        for attempt_id in [name for name, booked in self._booked.items() if booked.replica == replica]:
            del self._booked[attempt_id]

    def keep(self, replicas: Collection[str]) -> None:
        """All others are gone: they count in nothing any more."""
        for replica in [name for name in self._known if name not in replicas]:
            self.forget(replica)

    def refuse(self, replica: str) -> None:
        """A replica has turned a request down: nothing more for it until it says anew how it stands."""
        self._known.setdefault(replica, _Known()).refused = True

    def suspect(self, replica: str) -> None:
        """A replica did not answer: choose it last for a while."""
        self._known.setdefault(replica, _Known()).suspect_since = self._clock()

    # ---- choosing

    def best(self, replicas: Sequence[str], demand: int, affinity: bytes = b"") -> str | None:
        """The replica to send ``demand`` slots to, or ``None`` where none has room for them.

        The one with the largest free share of slots and of places in its batch; ties at random. With an ``affinity``,
        the one that everybody with the same affinity is sent to, unless it is much fuller than the best.

        Whether there is room is judged by the latest report. How much, compared with others, is not: what other
        ingresses have sent in this instant is in the reports of some replicas and not yet in those of the rest, and
        all ingresses would run to the rest. So their part is taken from the last survey, the same moment for all, less
        what has ended since: that, replicas tell everybody at once.
        """
        now = self._clock()
        free: list[tuple[bool, float, float, str]] = []
        for replica in replicas:
            share = self._free_share(replica, demand, now)
            if share is not None:
                free.append((self._is_suspect(replica, now), -share, self._rng.random(), replica))
        if not free:
            return None
        best = min(free)
        if affinity:
            like = [each for each in free if each[0] == best[0] and each[1] <= best[1] + LESS_FREE]
            return max(like, key=lambda each: _affinity_rank(affinity, each[3]))[3]
        return best[3]

    def book(self, attempt_id: str, replica: str, demand: int) -> None:
        """A request of ``demand`` slots is being sent to a replica."""
        booked = self._booked[attempt_id] = _Booked(replica, demand)
        known = self._known.setdefault(replica, _Known())
        known.unseen[attempt_id] = booked
        known.in_flight_slots += demand
        known.in_flight += 1

    def confirm(self, attempt_id: str, number: int) -> None:
        """The replica has accepted it under that number."""
        booked = self._booked.get(attempt_id)
        if booked is None:
            return
        booked.number = number
        known = self._known[booked.replica]
        if known.standing is not None and _is_seen(booked, known.standing):
            known.unseen.pop(attempt_id, None)

    def release(self, attempt_id: str) -> None:
        """It was not accepted, or has ended. Its slots count as free once the replica says so. Unknown: no error."""
        booked = self._booked.pop(attempt_id, None)
        if booked is not None:
            known = self._known[booked.replica]
            known.unseen.pop(attempt_id, None)
            known.in_flight_slots -= booked.demand
            known.in_flight -= 1

    # ---- facts

    def headroom(self, replica: str) -> int:
        """Estimated slots a new request could reserve at once on the replica."""
        known = self._known.get(replica, _Known())
        if known.standing is None:
            return -known.in_flight_slots
        if self._clock() - known.received_at > self._stale_after_s:
            return known.standing.load.n_slots - known.in_flight_slots
        return known.standing.load.headroom - sum(booked.demand for booked in known.unseen.values())

    def n_slots(self, replica: str) -> int:
        """Slots the replica has in total, as far as it said."""
        return self.load(replica).n_slots

    def report_age_s(self, replica: str) -> float:
        """Seconds since the replica last said how it stands; 0 where it never did."""
        known = self._known.get(replica)
        return 0.0 if known is None or known.standing is None else max(0.0, self._clock() - known.received_at)

    @property
    def in_flight(self) -> int:
        """Requests booked and not released; zero when idle."""
        return len(self._booked)

    @property
    def iteration_s(self) -> float:
        """Seconds an iteration takes on the slowest replica, smoothed; 0 while nothing has been seen."""
        return max((known.iteration_s for known in self._known.values()), default=0.0)

    def load(self, replica: str) -> Load:
        """What the replica said last; zeros where it never did."""
        known = self._known.get(replica)
        return Load() if known is None or known.standing is None else known.standing.load

    def _is_suspect(self, replica: str, now: float) -> bool:
        """It did not answer, or has work and its iterations stand still: it may be about to be replaced."""
        known = self._known[replica]
        standing, since = known.standing, known.suspect_since
        stands_still = standing is not None and standing.at - known.progress_at > self._stale_after_s
        return stands_still or (since is not None and now - since < SUSPECT_S)

    def _free_share(self, replica: str, demand: int, now: float) -> float | None:
        """Part of the replica that is free, of its slots or of its batch, whichever is less; ``None``: no room."""
        known = self._known.get(replica)
        if known is None or known.standing is None or known.refused:
            return None
        load, headroom = known.standing.load, self.headroom(replica)
        n_open = load.running + load.waiting + len(known.unseen)
        if headroom < demand or n_open >= self._max_batch_size:
            return None
        if known.others is not None and now - known.received_at <= self._stale_after_s:
            unseen, others = sum(booked.demand for booked in known.unseen.values()), known.others
            told_since = known.received_at > known.asked_at
            seen, n_seen = known.in_flight_slots - unseen, known.in_flight - len(known.unseen)
            headroom = load.n_slots - unseen - _taken(load.n_slots - load.headroom, seen, others[0], told_since)
            n_open = len(known.unseen) + _taken(load.running + load.waiting, n_seen, others[1], told_since)
        return min(headroom / load.n_slots, 1.0 - n_open / self._max_batch_size)


def _taken(reported: int, ours: int, others: int, told_since: bool) -> int:
    """What we and others have of a replica, when others had ``others`` at the last survey.

    What is shared in its cache counts once, so that ours may be more than all that is reported.
    """
    return min(reported, ours) + (min(others, max(0, reported - ours)) if told_since else others)


def _is_seen(booked: _Booked, standing: Standing) -> bool:
    return booked.number is not None and booked.number <= standing.n_accepted


def _affinity_rank(affinity: bytes, replica: str) -> bytes:
    """Rendezvous hashing: every ingress sends an affinity to the same replica, and few move when a replica goes."""
    return hashlib.blake2b(affinity + b"@" + replica.encode(), digest_size=8).digest()
