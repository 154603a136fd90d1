"""Every unfinished request of an engine, in arrival order (Orca figure 4: the request pool)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from orca_core.errors import InvariantError
from orca_core.request import Request, RequestState

_SPARE_DEADLINES: Final = 64


class RequestPool:
    """Requests by id: waiting in arrival order, running in the order of admission. Used by the loop thread alone."""

    def __init__(self) -> None:
        # by deadline; requests that have ended are dropped when they come up, or when they are most of it
        self._deadlines: list[tuple[float, int, Request]] = []
        self._n_added = 0
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._queued_slots = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Request]:
        """Running first, in the order of admission, then waiting, in the order of arrival."""
        yield from self._running.values()
        yield from self._waiting.values()

    @property
    def n_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def queued_slots(self) -> int:
        """Total demand of the waiting requests."""
        return self._queued_slots

    def waiting(self) -> Iterator[Request]:
        """Waiting requests, oldest first."""
        return iter(self._waiting.values())

    def running(self) -> Iterator[Request]:
        """Running requests, in the order of admission."""
        return iter(self._running.values())

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Append a new request to the end of the waiting line."""
        if self.get(request.request_id) is not None:
            raise InvariantError(f"request {request.request_id} is in the pool already")
        demand = request.total_tokens
        if request.deadline is not None:  # first: it is what may fail, and then nothing is left behind
            self._n_added += 1
            heapq.heappush(self._deadlines, (request.deadline, self._n_added, request))
        self._waiting[request.request_id] = request
        self._queued_slots += demand

    def expired(self, now: float) -> list[Request]:
        """The unfinished requests whose deadline has passed, the earliest first. Costs nothing while there are none."""
        found: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if request.state is not RequestState.FINISHED:
                found.append(request)
        return found

    def admit(self, request: Request, now: float, n_cached: int = 0) -> None:
        """Move a request from the waiting line to the running ones; ``n_cached`` as in ``Request.admit``.

        Raises ``InvariantError``, and has changed nothing then.
        """
        if self._waiting.get(request.request_id) is not request:
            raise InvariantError(f"request {request.request_id} is admitted, but does not wait here")
        request.admit(now, n_cached)
        self._running[request.request_id] = self._waiting.pop(request.request_id)
        self._queued_slots -= request.total_tokens

    def finish(self, request: Request) -> None:
        """Take a request out, whatever state it is in. Raises ``InvariantError``, and has changed nothing then."""
        if self.get(request.request_id) is not request:
            raise InvariantError(f"request {request.request_id} is finished, but is not in the pool")
        request.finish()
        if self._running.pop(request.request_id, None) is None:
            del self._waiting[request.request_id]
            self._queued_slots -= request.total_tokens
        if len(self._deadlines) > 2 * len(self) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not RequestState.FINISHED]
            heapq.heapify(self._deadlines)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Audit the pool. Raises ``InvariantError``."""
        if any(r.state is not RequestState.WAITING for r in self._waiting.values()):
            raise InvariantError("a request in the waiting line is not waiting")
        if any(r.state is not RequestState.RUNNING for r in self._running.values()):
            raise InvariantError("a request among the running ones is not running")
        if self._queued_slots != sum(r.total_tokens for r in self._waiting.values()):
            raise InvariantError("queued_slots differs from the demand of the waiting requests")
        timed = sum(entry[2].state is not RequestState.FINISHED for entry in self._deadlines)
        if timed > sum(r.deadline is not None for r in self):
            raise InvariantError("a deadline is kept of a request that is not here")
        if idle and len(self):
            raise InvariantError(f"idle, but {len(self)} requests are in the pool")
