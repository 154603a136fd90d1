"""One client's stream over whatever becomes of the replicas: nothing twice, nothing lost. Free of Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from deployment.dispatcher import Dispatcher
from deployment.entry import Entry
from deployment.feed import Feed, ReplicaLostError
from deployment.serving import ServedChunk
from orca_core.errors import RequestCancelledError, UnavailableError
from orca_core.types import GenerationChunk, GenerationRequest, Timings

_log = logging.getLogger(__name__)

AFFINITY_TOKENS: Final = 64
"""Requests whose first so many tokens are the same are sent to the same replica: its cache may hold them."""


class StreamSettings(NamedTuple):
    """``max_resumes``: times a stream may go on elsewhere. ``max_backlog``: tokens its reader may lag behind.

    ``affinity``: whether requests that begin alike should meet; pointless where replicas cache nothing.
    """

    max_resumes: int
    max_backlog: int
    affinity: bool = True


class ResumingStream:
    """The answer to one request. Iterating ends after the chunk with a finish reason, or raises the request's error.

    When its replica is lost, the request is sent to another one with what was emitted so far as given; what had come
    from the lost one is delivered first and counts as emitted. A request that takes its replicas with it ends after
    ``max_resumes``. ``on_resume``: called whenever it goes on. ``arrived_at``, ``deadline``: on the ``clock``, seconds.
    ``handle``: by what ``Cancel`` finds it, where that is not ``client_request_id``.
    """

    def __init__(
        self,
        request: GenerationRequest,
        client_request_id: str,
        dispatcher: Dispatcher,
        settings: StreamSettings,
        clock: Callable[[], float],
        *,
        on_resume: Callable[[], object],
        arrived_at: float,
        deadline: float,
        session_id: str = "",
        handle: str = "",
    ) -> None:
        self._request = request
        self._visible_id = client_request_id
        self._dispatcher = dispatcher
        self._settings = settings
        self._clock = clock
        self._on_resume = on_resume
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._emitted: list[int] = []
        self._cancelled = False
        self._finished = False
        affinity = affinity_of(session_id, request.token_ids) if settings.affinity else b""
        self._entry = Entry(request, client_request_id, deadline, self._new_feed(), affinity, handle)
        self.resumes = 0

    def open(self) -> None:
        """Join the waiting line. Raises as ``Dispatcher.enter``."""
        self._dispatcher.enter(self._entry)

    @property
    def on_replica(self) -> bool:
        """Whether a replica has it or is being asked: then the engine sees to its deadline."""
        return self._entry.place is not None

    def cancel(self) -> None:
        """End the request wherever it is; whoever reads gets ``RequestCancelledError``. Idempotent, never blocks."""
        if self._finished or self._cancelled:
            return
        self._cancelled = True
        self._dispatcher.leave(self._entry)
        self._entry.feed.fail(RequestCancelledError(self._request.request_id))

    def __aiter__(self) -> ResumingStream:
        return self

    async def __anext__(self) -> ServedChunk:
        """Wait for the next chunk, from whichever replica."""
        while not self._finished:
            feed = self._entry.feed
            try:
                chunk = await feed.next()
            except ReplicaLostError as error:
                self._resume(error)
                continue
            self._emitted += chunk.token_ids
            if self._first_at is None:
                self._first_at = feed.first_at
            if chunk.finish_reason is not None:
                self._finished = True
                chunk = chunk._replace(timings=self._timings(chunk, feed))
            return ServedChunk(chunk, self._visible_id, feed.replica, self.resumes)
        raise StopAsyncIteration

    def _resume(self, error: ReplicaLostError) -> None:
        """Go back to the line. Raises ``UnavailableError`` when it has been lost too often."""
        if self._cancelled:
            raise RequestCancelledError(self._request.request_id)
        if self.resumes >= self._settings.max_resumes:
            _log.error("request %s has lost its replica %d times, given up", self._entry.name, self.resumes + 1)
            raise UnavailableError(f"the stream lost its replica {self.resumes + 1} times")
        self.resumes += 1
        self._on_resume()
        n_emitted = len(self._emitted)
        _log.warning("request %s lost replica %s after %d tokens, goes on", self._entry.name, error.replica, n_emitted)
        self._entry.feed = self._new_feed()
        self._entry.request = replace(self._request, emitted_ids=tuple(self._emitted))
        self._dispatcher.come_back(self._entry)

    def _new_feed(self) -> Feed:
        return Feed(self._settings.max_backlog, self._clock)

    def _timings(self, chunk: GenerationChunk, feed: Feed) -> Timings:
        """Those of the whole request, from its arrival here: the line, the way, and every replica."""
        accepted_at = self._entry.accepted_at
        queue_s = (self._arrived_at if accepted_at is None else accepted_at) - self._arrived_at
        if chunk.timings is not None and not self.resumes:
            queue_s += chunk.timings.queue_s
        first_at = feed.last_at if self._first_at is None else self._first_at
        ttft_s = first_at - self._arrived_at
        return Timings(min(queue_s, ttft_s), ttft_s, feed.last_at - self._arrived_at)


def affinity_of(session_id: str, token_ids: tuple[int, ...]) -> bytes:
    """What tells requests that should meet on a replica: the session, else how a long prompt begins; else nothing."""
    if session_id:
        return b"s" + session_id.encode("utf-8", "surrogatepass")
    if len(token_ids) > AFFINITY_TOKENS:
        return b"p" + b",".join(b"%d" % token_id for token_id in token_ids[:AFFINITY_TOKENS])
    return b""
