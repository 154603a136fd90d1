"""Where callers and the loop thread of an engine meet: what was handed in, and what is known of the books."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from orca_core.admission import Admission
from orca_core.channel import Channel, Ticket
from orca_core.errors import EngineClosedError, EngineDeadError, InvalidRequestError
from orca_core.types import CancelOutcome, GenerationRequest, Health, Load


class Arrival(NamedTuple):
    """A request on its way to the loop. ``arrived_at``: seconds on the engine's clock."""

    request: GenerationRequest
    ticket: Ticket
    arrived_at: float


class Cancel(NamedTuple):
    """A request that is to end. ``ticket``: of the channel it must write to; ``None`` = whoever has that id."""

    request_id: str
    ticket: Ticket | None


class Inbox:
    """Requests and cancels that the loop has not taken in yet, and the last books it showed. Every method may be called
    from any thread.

    Life: new, open (``open``), closing (``close``: the loop ends when it is drained or out of time), and at any time
    dead (``bury``).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wakeup = threading.Condition()
        # Channels that were let go of: in any thread, whatever it holds. So no lock guards this, and nobody is woken;
        # while such a request is open, the loop is awake.
        self._dropped: deque[Ticket] = deque()
        # everything below is guarded by _wakeup
        self._arrivals: deque[Arrival] = deque()
        self._taken: deque[Arrival] = deque()  # the loop has them in hand
        self._cancels: list[Cancel] = []
        self._admission: Admission | None = None
        self._progress_at = 0.0
        self._drain_until: float | None = None  # set once the engine is closing
        self._dead: EngineDeadError | None = None

    # ---- the callers' side

    def open(self, admission: Admission) -> None:
        """From now on requests are taken."""
        with self._wakeup:
            self._admission = admission
            self._progress_at = self._clock()

    def close(self, drain_timeout_s: float) -> None:
        """Refuse new requests; the open ones have that many seconds, or what is left of an earlier call's."""
        with self._wakeup:
            until = self._clock() + drain_timeout_s
            self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
            self._wakeup.notify_all()

    def submit(self, request: GenerationRequest) -> Channel:
        """Hand in a request. Raises as ``Engine.submit`` does."""
        with self._wakeup:
            now, admission = self._clock(), self._check_open()
            if request.request_id in admission:
                raise InvalidRequestError("request_id", "is in use by an unfinished request")
            channel = Channel(request.request_id, lambda _: self._leave(ticket), self._dropped.append)
            ticket = channel.ticket
            was_idle = not len(admission)
            admission.enter(request.request_id, request.total_tokens, now)
            if was_idle:  # progress is measured from here
                self._progress_at = now
            self._arrivals.append(Arrival(request, ticket, now))
            self._wakeup.notify_all()
        return channel

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Channel]:
        """Hand in requests that the loop sees together. Where it raises, none runs."""
        channels: list[Channel] = []
        with self._wakeup:  # reentrant: the loop takes arrivals in only once it is free again
            try:
                for request in requests:
                    channels.append(self.submit(request))
            except BaseException:
                for channel in channels:
                    channel.close()
                raise
        return channels

    def cancel(self, request_id: str) -> CancelOutcome:
        """Ask for a request to end."""
        with self._wakeup:
            if self._admission is not None and request_id in self._admission:
                self._cancels.append(Cancel(request_id, None))
                self._wakeup.notify_all()
                return CancelOutcome.CANCELLED
            ended = self._admission is not None and self._admission.has_ended(request_id)
            return CancelOutcome.ALREADY_FINISHED if ended else CancelOutcome.NOT_FOUND

    def _leave(self, ticket: Ticket) -> None:
        """A reader closes its channel. The id may belong to another request by now, which is spared."""
        with self._wakeup:
            if self._admission is not None and ticket.request_id in self._admission:
                self._cancels.append(Cancel(ticket.request_id, ticket))
                self._wakeup.notify_all()

    def _check_open(self) -> Admission:
        if self._dead is not None:
            raise self._dead
        if self._admission is None or self._drain_until is not None:
            raise EngineClosedError("the engine is not running" if self._admission is None else "the engine is closing")
        return self._admission

    # ---- facts

    def load(self) -> Load:
        """The last books, with what has arrived since counted as queued."""
        with self._wakeup:
            return Load() if self._admission is None else self._admission.load

    def health(self, progress_timeout_s: float) -> Health:
        """Not ok once the engine is dead, or work was pending that long and no iteration and no request has ended."""
        with self._wakeup:
            if self._dead is not None:
                return Health(False, self._dead.reason)
            stalled_s = self._stalled_s(progress_timeout_s)
            if stalled_s:
                n_open = 0 if self._admission is None else len(self._admission)
                return Health(False, f"no progress for {stalled_s:.0f} s with {n_open} requests open")
            return Health(True)

    def stalled_s(self, progress_timeout_s: float) -> float:
        """Seconds for which the loop has hung; 0 = it has not, or it is buried."""
        with self._wakeup:
            return 0.0 if self._dead is not None else self._stalled_s(progress_timeout_s)

    def _stalled_s(self, progress_timeout_s: float) -> float:
        stalled_s = self._clock() - self._progress_at
        has_work = self._admission is not None and len(self._admission) > 0
        return stalled_s if has_work and stalled_s > progress_timeout_s else 0.0

    # ---- the loop thread's side

    def take(self, is_idle: Callable[[], bool]) -> tuple[Iterator[Arrival], Sequence[Cancel]] | None:
        """Wait while the loop has nothing to do, then give it what there is. ``None``: it is time to end.

        An arrival is the loop's when it asks for the next one; until then ``bury`` finds it.
        """
        with self._wakeup:
            while is_idle() and not self._arrivals and not self._cancels and self._drain_until is None:
                self._wakeup.wait()
            if self._drain_until is not None and (
                self._clock() >= self._drain_until or (is_idle() and not self._arrivals)
            ):
                return None
            cancels, self._cancels = self._cancels, []
            self._take_arrivals()
            while self._dropped:  # after the arrivals: those may be among them
                ticket = self._dropped.popleft()
                cancels.append(Cancel(ticket.request_id, ticket))
            return self._hand_over(), cancels

    def _take_arrivals(self) -> None:
        self._taken.extend(self._arrivals)
        self._arrivals.clear()
        if self._admission is not None:
            self._admission.take_in()

    def _hand_over(self) -> Iterator[Arrival]:
        while self._taken:  # the loop thread's alone
            yield self._taken[0]
            self._taken.popleft()

    def on_end(self, request_id: str) -> None:
        """A request has left the loop."""
        with self._wakeup:
            self._progress_at = self._clock()
            if self._admission is not None:
                self._admission.leave(request_id, self._progress_at)
            # what was meant for it comes too late, and must not hit the next request of its id
            self._cancels = [cancel for cancel in self._cancels if cancel.request_id != request_id]

    def on_books(self, load: Load) -> None:
        """A turn of the loop is over, and nobody has heard of it yet. A turn without an iteration is no progress."""
        with self._wakeup:
            if self._admission is not None:
                if load.iterations != self._admission.n_iterations:
                    self._progress_at = self._clock()
                self._admission.book(load)

    def bury(self, error: EngineClosedError | EngineDeadError) -> Sequence[Arrival]:
        """The loop ends: nothing is taken any more. Returns whoever came last and must be told."""
        with self._wakeup:
            if isinstance(error, EngineDeadError):
                self._dead = error
            elif self._drain_until is None:
                self._drain_until = self._clock()
            self._take_arrivals()
            return tuple(self._taken)
