"""A request of a client while it is in an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from deployment.resuming import ResumingStream
from orca_core.errors import DeadlineExceededError, OrcaError, RequestCancelledError

DEADLINE_GRACE_S: Final = 0.5
"""The engine ends a request it has at its deadline; if nothing was heard so long after it, the ingress does."""

TRANSIT_S: Final = 0.25
TRANSIT_SHARE: Final = 0.1
"""A request was on its way to us for at most that many seconds, and at most that part of its time."""

ROUNDING: Final = 0.01
"""Part of a deadline by which gRPC may send it longer than it is."""


@dataclass(slots=True)
class LiveRequest:
    """A request between its arrival and its end. ``visible_id``: the client's own id, or ours where it gave none."""

    request_id: str
    visible_id: str
    timeout_s: float
    arrived_at: float  # on the ingress's clock, as is the deadline
    has_deadline: bool = False  # of the client's own; otherwise it knows of none
    stream: ResumingStream | None = None
    verdict: OrcaError | None = None  # why we have ended it ourselves

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


class Alarm:
    """Ends a request at its deadline: at once where it waits, a little later where an engine should have done it."""

    def __init__(self, live: LiveRequest, stream: ResumingStream, clock: Callable[[], float]) -> None:
        self._live = live
        self._stream = stream
        self._timer = asyncio.get_running_loop().call_later(live.deadline - clock(), self._ring)

    def _ring(self) -> None:
        if self._stream.on_replica:
            self._timer = asyncio.get_running_loop().call_later(DEADLINE_GRACE_S, self._live.expire)
        else:
            self._live.expire()

    def cancel(self) -> None:
        """The request has ended."""
        self._timer.cancel()
