"""A request of a client while it is in an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from deployment.client_ids import ClientIds
from deployment.resuming import ResumingStream
from orca_core.errors import DeadlineExceededError, OrcaError, RequestCancelledError
from orca_core.types import CancelOutcome

DEADLINE_GRACE_S: Final = 0.5
"""The engine ends a request it has at its deadline; if nothing was heard so long after it, the ingress does."""

READER_GRACE_S: Final = 5.0
"""A request that is over, and whose reader has not taken that in for so long, holds nothing any more and is counted."""

TRANSIT_S: Final = 0.25
TRANSIT_SHARE: Final = 0.1
"""A request was on its way to us for at most that many seconds, and at most that part of its time."""

ROUNDING: Final = 0.01
"""Part of a deadline by which gRPC may send it longer than it is."""


@dataclass(slots=True)
class LiveRequest:
    """A request between its arrival and its end. ``visible_id``: the client's own id, or ours where it gave none.

    ``handle``: by what ``Cancel`` finds it, see ``client_ids.handle_of``.
    """

    request_id: str
    visible_id: str
    handle: str
    timeout_s: float
    arrived_at: float  # on the ingress's clock, as is the deadline
    has_deadline: bool = False  # of the client's own; otherwise it knows of none
    stream: ResumingStream | None = None
    verdict: OrcaError | None = None  # why we have ended it ourselves
    is_closed: bool = False  # its reader did not come back in time: it is counted, and nothing more is handed on

    @property
    def deadline(self) -> float:
        """When it must have ended."""
        return self.arrived_at + self.timeout_s

    def is_at_deadline(self, now: float) -> bool:
        """Whether a client that hangs up now does so because of its deadline.

        Its clock has been running since it sent the request, for as long as that was on its way, so it is gone a
        little before ours says so.
        """
        early_s = min(TRANSIT_S + ROUNDING * self.timeout_s, TRANSIT_SHARE * self.timeout_s)
        early_s = early_s if self.has_deadline else 0.0
        return now >= self.deadline - early_s

    def end(self, verdict: OrcaError) -> None:
        """End it from our side; the first verdict stands."""
        self.verdict = self.verdict or verdict
        if self.stream is not None:
            self.stream.cancel()

    def cancel(self) -> None:
        """``Cancel`` was called for it."""
        self.end(RequestCancelledError(self.visible_id))

    def expire(self) -> None:
        """Its deadline has passed and nobody has ended it."""
        self.end(DeadlineExceededError(self.timeout_s))


class LiveRequests:
    """Those of one ingress. Several may share a handle; one that has ended is remembered for a while."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}  # by our id
        self._ids = ClientIds()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._live.values()))

    def __contains__(self, handle: str) -> bool:
        return bool(self._ids.live(handle))

    def arrive(self, live: LiveRequest) -> None:
        """A request has come."""
        self._live[live.request_id] = live
        self._ids.begin(live.handle, live.request_id)

    def depart(self, live: LiveRequest) -> None:
        """It has ended, whichever way."""
        del self._live[live.request_id]
        self._ids.end(live.request_id)

    def cancel(self, handle: str) -> CancelOutcome:
        """Cancel all of a handle."""
        here = self._ids.live(handle)
        for request_id in here:
            self._live[request_id].cancel()
        if here:
            return CancelOutcome.CANCELLED
        return CancelOutcome.ALREADY_FINISHED if self._ids.is_known(handle) else CancelOutcome.NOT_FOUND


class Alarm:
    """Ends a request at its deadline: at once where it waits, a little later where an engine should have done it.

    ``on_stall``: called where its reader takes nothing for ``READER_GRACE_S`` more: its connection is full, and whoever
    waits to write into it cannot be woken, so what the request holds has to be given back for it.
    """

    def __init__(
        self, live: LiveRequest, stream: ResumingStream, clock: Callable[[], float], on_stall: Callable[[], object]
    ) -> None:
        self._live = live
        self._stream = stream
        self._on_stall = on_stall
        self._timer = asyncio.get_running_loop().call_later(live.deadline - clock(), self._ring)

    def _ring(self) -> None:
        if self._stream.on_replica:
            self._timer = asyncio.get_running_loop().call_later(DEADLINE_GRACE_S, self._expire)
        else:
            self._expire()

    def _expire(self) -> None:
        self._live.expire()
        self._timer = asyncio.get_running_loop().call_later(READER_GRACE_S, self._on_stall)

    def cancel(self) -> None:
        """The request has ended."""
        self._timer.cancel()
