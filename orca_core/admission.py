"""The door of an engine: how much may be open at once, and when to come back if it is too much."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from orca_core.errors import OverloadedError

RETRY_RANGE_S: Final = (0.5, 60.0)
_N_ENDS: Final = 64
N_REMEMBERED: Final = 4096
"""How many ended requests can still be told from unknown ones."""


class Admission:
    """Books of the demand that is open in an engine: running, waiting or on its way to the loop.

    What exceeds ``n_slots`` or ``max_batch_size`` cannot be running, so it waits; ``max_waiting_requests`` and
    ``max_waiting_slots`` bound that (``None`` = no bound). Not thread-safe: the engine calls it under its lock.
    """

    def __init__(
        self, n_slots: int, max_batch_size: int, max_waiting_requests: int | None, max_waiting_slots: int | None
    ) -> None:
        self._max_requests = None if max_waiting_requests is None else max_batch_size + max_waiting_requests
        self._max_slots = None if max_waiting_slots is None else n_slots + max_waiting_slots
        self._open: dict[str, int] = {}
        self._demand = 0
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ends: deque[tuple[float, int]] = deque(maxlen=_N_ENDS)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, request_id: str, demand: int, now: float) -> None:
        """Open a request of ``demand`` slots. Raises ``OverloadedError`` where the line is full."""
        if self._max_requests is not None and len(self._open) >= self._max_requests:
            raise OverloadedError("too many requests are waiting", self._retry_after_s(demand, now))
        # one that is alone always enters: it waits for nobody
        if self._max_slots is not None and self._open and self._demand + demand > self._max_slots:
            excess = self._demand + demand - self._max_slots
            raise OverloadedError("the waiting requests need too many slots", self._retry_after_s(excess, now))
        self._open[request_id] = demand
        self._demand += demand

    def leave(self, request_id: str, now: float) -> None:
        """The request has ended, whichever way."""
        demand = self._open.pop(request_id, None)
        if demand is not None:
            self._demand -= demand
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
