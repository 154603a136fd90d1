"""The replicas as the ingress sees them, whichever they are at the moment; the only user of the deployment handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any, Protocol

from deployment.broadcast import ANSWER_TIMEOUT_S, ask_all, best_outcome
from deployment.parcels import NOTHING_WAITS, Accepted, LineDepth, Parcel, Pinned, Rejected, ReplicaReport, Submission
from deployment.submissions import Answer, Submissions
from orca_core.types import CancelOutcome, GenerationRequest

_log = logging.getLogger(__name__)


class ParcelStream(Protocol):
    """What comes from a replica; ending it ends the requests on it."""

    def __aiter__(self) -> AsyncIterator[Parcel]: ...

    def cancel(self) -> None:
        """End it, wherever it is. Idempotent, never blocks."""


class ReplicaSet(Protocol):
    """Every replica of the service, by name."""

    async def reports(self, ingress_id: str, line: LineDepth) -> list[ReplicaReport]:
        """The reports of all replicas that answer in time; empty where there is none. Shows them that we live.

        ``line``: what waits in the ingress.
        """
        ...

    def attach(self, replica: str, ingress_id: str, link_id: str) -> ParcelStream:
        """Begin to listen to a replica; raises, while it is read, whatever becomes of the replica."""
        ...

    async def submit(
        self, replica: str, link_id: str, request: GenerationRequest, client_request_id: str
    ) -> Accepted | Rejected:
        """Ask a replica to begin a request whose answer is to come over that link.

        Raises ``UnavailableError`` where the replica has left the set or its engine is closing, the request's own
        error, or whatever becomes of the call.
        """
        ...

    def drop(self, replica: str, link_id: str, request_ids: tuple[str, ...]) -> None:
        """Nobody wants these requests (our ids) any more: let a replica know, without waiting for it.

        Reaches replicas that have left the set, too; without any request it only shows them that we live.
        """

    def pace(self, replica: str, link_id: str, interval_s: float) -> None:
        """Have a replica's parcels leave at intervals, or, with 0, as they come; does not wait until it has heard."""

    async def first(self) -> None:
        """Wait for any replica to be there; that somebody waits makes Serve start one, where there is none."""

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Cancel a client's requests on all replicas."""
        ...


class ServeReplicaSet:
    """The replicas behind a Ray Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._attach = handle.options(method_name="attach", stream=True)
        self._submit_all = handle.options(method_name="submit_all")
        self._submissions = Submissions(self._carry)
        self._drop = handle.options(method_name="drop")
        self._pace = handle.options(method_name="pace")
        self._report = handle.options(method_name="report")
        self._telling: set[asyncio.Task[None]] = set()  # the event loop itself keeps no reference

    async def reports(self, ingress_id: str, line: LineDepth) -> list[ReplicaReport]:
        """See ``ReplicaSet.reports``."""
        return await ask_all(self._handle, "report", ReplicaReport, ingress_id, line)

    def attach(self, replica: str, ingress_id: str, link_id: str) -> ParcelStream:
        """See ``ReplicaSet.attach``."""
        stream: ParcelStream = self._attach.remote(Pinned(replica), ingress_id, link_id)
        return stream

    async def submit(
        self, replica: str, link_id: str, request: GenerationRequest, client_request_id: str
    ) -> Accepted | Rejected:
        """See ``ReplicaSet.submit``."""
        return await self._submissions.submit(replica, link_id, Submission(request, client_request_id))

    async def _carry(self, replica: str, link_id: str, submissions: tuple[Submission, ...]) -> tuple[Answer, ...]:
        call = self._submit_all.remote(Pinned(replica), link_id, submissions)
        try:
            answers: tuple[Answer, ...] = await call
        except asyncio.CancelledError:
            call.cancel()
            raise
        return answers

    def drop(self, replica: str, link_id: str, request_ids: tuple[str, ...]) -> None:
        """See ``ReplicaSet.drop``."""
        self._tell(self._drop, replica, link_id, request_ids)

    def pace(self, replica: str, link_id: str, interval_s: float) -> None:
        """See ``ReplicaSet.pace``."""
        self._tell(self._pace, replica, link_id, interval_s)

    def _tell(self, method: Any, replica: str, link_id: str, what: object) -> None:
        to = Pinned(replica, may_have_left=True)
        task = asyncio.create_task(self._told(method, to, link_id, what), context=Context())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _told(self, method: Any, to: Pinned, link_id: str, what: object) -> None:
        """Whoever cannot be told any more is dead, or will find its link closed."""
        call = method.remote(to, link_id, what)
        try:
            await asyncio.wait_for(call, ANSWER_TIMEOUT_S)
        except Exception as error:
            call.cancel()
            _log.debug("replica %s was not told: %s", to.replica, type(error).__name__)

    async def first(self) -> None:
        """See ``ReplicaSet.first``. A call that names no replica waits for one in its handle, and Serve counts it."""
        call = self._report.remote("", NOTHING_WAITS)
        try:
            await call
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """See ``ReplicaSet.cancel``."""
        return best_outcome(await ask_all(self._handle, "cancel", CancelOutcome, client_request_id))
