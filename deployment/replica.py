"""A replica: owns exactly one engine and answers every ingress over one stream. A plain class, free of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from deployment.client_ids import ClientIds
from deployment.metrics import ReplicaMetrics, Silent
from deployment.outlet import Outlet, ReplicaEngine
from deployment.parcels import (
    NOTHING_WAITS,
    Accepted,
    Failed,
    LineDepth,
    Parcel,
    Pinned,
    Rejected,
    ReplicaReport,
    Standing,
    Submission,
)
from deployment.scaling_reports import scaling_stats
from orca_core.errors import EngineDeadError, OrcaError, OverloadedError
from orca_core.types import CancelOutcome, GenerationRequest, Load

_log = logging.getLogger(__name__)

LEASE_S: Final = 15.0
"""An ingress that was not heard of for so long, nor for ``LEASE_BEATS`` heartbeats, is given up: nobody reads what is
computed for it."""

LEASE_BEATS: Final = 6.0

HEAD_START_S: Final = 0.001
"""Before an idle engine's first requests are acknowledged."""

LINE_FRESH_S: Final = 5.0
"""What an ingress said of its line counts for so long: one that has died must not leave a queue behind."""


@dataclass(slots=True)
class _Attached:
    """An ingress that listens. ``heard_at``: when it last asked for a report, or dropped, monotonic seconds."""

    link_id: str
    outlet: Outlet
    heard_at: float


class Replica:
    """Serves one engine. Every method runs on the actor's event loop; ``name`` is unique in the service.

    An ingress attaches: it opens a stream under a link id of its own making, on which the answers to all that it
    submits come back. When that stream ends, whichever way, so do its requests.

    ``heartbeat_s``: seconds without a parcel after which one goes out all the same. ``clock``: wall-clock seconds
    (reports of replicas are compared across processes); ``monotonic``: seconds.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        name: str,
        clock: Callable[[], float] = time.time,
        metrics: ReplicaMetrics | None = None,
        *,
        heartbeat_s: float = 0.5,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._name = name
        self._clock = clock
        self._metrics = metrics or ReplicaMetrics(Silent(), name)
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._attached: dict[str, _Attached] = {}  # by ingress
        self._clients = ClientIds()
        self._beat: asyncio.TimerHandle | None = None
        self._lines: dict[str, tuple[LineDepth, float]] = {}  # by ingress, with when it said so

    async def start(self) -> None:
        """Load the model (this may take minutes) beside the event loop, so that the actor still answers Serve."""
        await asyncio.to_thread(self._engine.start)

    # ---- requests

    async def attach(self, to: Pinned, ingress_id: str, link_id: str) -> AsyncGenerator[Parcel, None]:
        """The stream to one ingress: a parcel at once, then one an iteration that has news for it, and heartbeats.

        A second stream of the same ingress takes the place of the first. Ending it cancels its requests.
        """
        earlier = self._attached.pop(ingress_id, None)
        if earlier is not None:
            earlier.outlet.close()
        outlet = Outlet(self._standing, self._engine.cancel, self._ended, self._monotonic)
        attached = self._attached[ingress_id] = _Attached(link_id, outlet, self._monotonic())
        if self._beat is None:
            self._beat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat_now)
        try:
            async with aclosing(outlet.parcels()) as parcels:
                async for parcel in parcels:
                    yield parcel
                    self._metrics.iterations()  # after it was sent: nobody waits for these
        finally:
            outlet.close()
            if self._attached.get(ingress_id) is attached:
                del self._attached[ingress_id]

    async def submit_all(
        self, to: Pinned, link_id: str, submissions: tuple[Submission, ...]
    ) -> tuple[Accepted | Rejected | OrcaError | Failed, ...]:
        """``submit`` for each, in their order; an error is the answer to its own request, and the others go on."""
        load = self._engine.load()
        was_idle = not load.running and not load.waiting
        answers: list[Accepted | Rejected | OrcaError | Failed] = []
        for request, client_request_id in submissions:
            try:
                answers.append(self.submit(request, link_id, client_request_id))
            except OrcaError as error:
                answers.append(error)
            except Exception as error:
                _log.exception("request %s could not be submitted", request.request_id)
                answers.append(Failed(type(error).__name__))
        if was_idle and any(isinstance(answer, Accepted) for answer in answers):
            # The engine's thread has been woken and needs the interpreter, which it would get once this answer is on
            # its way, half a millisecond later. Nobody waits for the answer: words may come before it.
            await asyncio.sleep(HEAD_START_S)
        return tuple(answers)

    def submit(self, request: GenerationRequest, link_id: str, client_request_id: str) -> Accepted | Rejected:
        """Begin a request if its whole demand can be reserved now; otherwise nothing has happened.

        A request id that was accepted before is not begun again. Raises ``InvalidRequestError``, and
        ``UnavailableError`` where the engine is closing or dead.
        """
        outlet = next((each.outlet for each in self._attached.values() if each.link_id == link_id), None)
        if outlet is None:
            return Rejected(Standing(self._engine.load(), self._monotonic(), 0))
        number = outlet.number_of(request.request_id)
        if number is not None:
            return Accepted(number)
        if outlet.is_dropped(request.request_id):
            return Rejected(outlet.standing())
        try:
            channel = self._engine.submit(request)
        except OverloadedError:
            return Rejected(outlet.standing())
        self._clients.begin(client_request_id, request.request_id)
        return Accepted(outlet.add(request.request_id, channel))

    async def drop(self, to: Pinned, link_id: str, request_ids: tuple[str, ...]) -> None:
        """Nobody wants these requests (our ids) any more: end them, or refuse them should they arrive only now.

        A sign of life of the ingress, too, even if there are none: once Serve has taken this replica out of its set, it
        is not asked for reports any more.
        """
        for each in self._attached.values():
            if each.link_id == link_id:
                each.heard_at = self._monotonic()
                each.outlet.drop(request_ids)

    async def pace(self, to: Pinned, link_id: str, interval_s: float) -> None:
        """An ingress that is short of CPU wants its parcels fewer and larger, or again as they come. See ``Outlet``."""
        for each in self._attached.values():
            if each.link_id == link_id:
                each.outlet.pace(interval_s)

    def _ended(self, request_id: str) -> None:
        """Slots are free: whoever has somebody waiting for them should know."""
        self._clients.end(request_id)
        self._tell_all()

    def _tell_all(self) -> None:
        for each in self._attached.values():
            each.outlet.tell()

    def _beat_now(self) -> None:
        """The heartbeat; ends with the last ingress."""
        self._end_leases()
        self._tell_all()
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(self._heartbeat_s, self._beat_now) if self._attached else None

    def _end_leases(self) -> None:
        """A dead ingress does not always end its stream: whoever has not asked for long is given up."""
        oldest = self._monotonic() - max(LEASE_S, LEASE_BEATS * self._heartbeat_s)
        for ingress_id in [name for name, each in self._attached.items() if each.heard_at < oldest]:
            self._attached.pop(ingress_id).outlet.close()

    def _standing(self) -> tuple[Load, bool]:
        return self._engine.load(), self._engine.health().ok

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Cancel every live request that was started with the client's own id."""
        live = self._clients.live(client_request_id)
        outcomes = [self._engine.cancel(request_id) for request_id in live]
        if CancelOutcome.CANCELLED in outcomes:
            return CancelOutcome.CANCELLED
        known = self._clients.is_known(client_request_id)
        return CancelOutcome.ALREADY_FINISHED if known else CancelOutcome.NOT_FOUND

    # ---- facts

    async def report(self, ingress_id: str = "", line: LineDepth = NOTHING_WAITS) -> ReplicaReport:
        """The replica's model and its load now. An ingress shows by asking that it still lives.

        ``line``: what waits there, before any replica: the autoscaler hears of what the replicas report, and nothing
        of an ingress. Each tells all replicas.
        """
        attached = self._attached.get(ingress_id)
        if attached is not None:
            attached.heard_at = self._monotonic()
        if ingress_id:
            self._lines[ingress_id] = line, self._clock()
        load, well = self._standing()
        self._metrics.iterations()
        self._metrics.load(load)  # asked for whether there is work or not, so that the gauges come back to zero
        return ReplicaReport(self._name, self._engine.info(), load, self._clock(), well)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Polled by Serve where the number of replicas may change, and handed to the policy in the controller."""
        oldest = self._clock() - max(LINE_FRESH_S, LEASE_BEATS * self._heartbeat_s)
        self._lines = {ingress: said for ingress, said in self._lines.items() if said[1] >= oldest}
        lines = [line for line, _ in self._lines.values()]
        return scaling_stats(
            self._engine.load(), sum(line.slots for line in lines), sum(line.requests for line in lines)
        )

    async def check_health(self) -> None:
        """Polled by Serve, which replaces the actor when this raises ``EngineDeadError``: no life, or no progress."""
        health = self._engine.health()
        if not health.ok:
            raise EngineDeadError(health.reason)

    def close(self) -> None:
        """End the engine. Serve has waited for open streams by now (``graceful_shutdown_timeout_s``)."""
        self._engine.close()
