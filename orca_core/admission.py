"""The door of an engine: how much may be open at once, and when to come back if it is too much."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from typing import Final

from orca_core.errors import OverloadedError
from orca_core.types import Load

RETRY_RANGE_S: Final = (0.5, 60.0)
_N_ENDS: Final = 64
N_REMEMBERED: Final = 4096
"""How many ended requests can still be told from unknown ones."""


class Admission:
    """The requests that are open in an engine: running, waiting or on their way to the loop.

    What exceeds ``max_batch_size`` or the slots cannot be running, so it waits; ``max_waiting_requests`` and
    ``max_waiting_slots`` bound that (``None`` = no bound). How many slots are left is the ledger's to say: requests
    that share blocks hold less than the sum of their demands. ``load``: its books when nothing is open. Not
    thread-safe: the engine calls it under its lock.
    """

    def __init__(
        self, load: Load, max_batch_size: int, max_waiting_requests: int | None, max_waiting_slots: int | None
    ) -> None:
        self._load = load
        self._arrived: list[int] = []  # demands that the loop has not seen
        self._taken_in: list[int] = []  # demands that the loop has seen, and its books don't show yet
        self._max_requests = None if max_waiting_requests is None else max_batch_size + max_waiting_requests
        self._max_waiting_slots = max_waiting_slots
        self._open: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ends: deque[tuple[float, int]] = deque(maxlen=_N_ENDS)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def load(self) -> Load:
        """What the books last showed, with what has come since counted as queued: never less than what is promised."""
        unbooked = len(self._arrived) + len(self._taken_in)
        if not unbooked:
            return self._load
        queued = self._load.queued_slots + sum(self._arrived) + sum(self._taken_in)
        return replace(self._load, queued_slots=queued, waiting=self._load.waiting + unbooked)

    @property
    def n_iterations(self) -> int:
        """Iterations that the books know of."""
        return self._load.iterations

    def take_in(self) -> None:
        """The loop takes in all that has arrived."""
        self._taken_in += self._arrived
        self._arrived.clear()

    def book(self, load: Load) -> None:
        """The books, with all in them that the loop has taken in."""
        self._load = load
        self._taken_in.clear()

    def enter(self, request_id: str, demand: int, now: float) -> None:
        """Open a request of ``demand`` slots. Raises ``OverloadedError`` where the line is full.

        With no waiting room at all (0, 0) whoever enters is admitted as soon as the loop looks: the ledger has room for
        the whole demand, and nobody takes it in between.
        """
        if self._max_requests is not None and len(self._open) >= self._max_requests:
            raise OverloadedError("too many requests are waiting", self._retry_after_s(demand, now))
        # one that is alone always enters: it waits for nobody
        if self._max_waiting_slots is not None and self._open:
            excess = demand - self.load.headroom - self._max_waiting_slots
            if excess > 0:
                raise OverloadedError("the waiting requests need too many slots", self._retry_after_s(excess, now))
        self._open[request_id] = demand
        self._arrived.append(demand)

    def leave(self, request_id: str, now: float) -> None:
        """The request has ended, whichever way."""
        demand = self._open.pop(request_id, None)
        if demand is not None:
            self._ends.append((now, demand))
        self._ended[request_id] = None
        while len(self._ended) > N_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, request_id: str) -> bool:
        """Whether a request of that id was open, lately, and is not any more."""
        return request_id in self._ended

    def _retry_after_s(self, slots: int, now: float) -> float:
        """Seconds until that many slots are free again, at the rate at which the last requests gave theirs back."""
        shortest, longest = RETRY_RANGE_S
        if len(self._ends) < 2 or now <= self._ends[0][0]:
            return 1.0
        rate = sum(demand for _, demand in self._ends) / (now - self._ends[0][0])
        return min(longest, max(shortest, slots / rate))
