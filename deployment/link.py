"""One ingress's link to one replica: the task that reads its parcels and feeds the streams. Free of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

from deployment.delivery import Delivery
from deployment.entry import Entry
from deployment.feed import ReplicaLostError
from deployment.parcels import Parcel, unpack
from deployment.replica_set import ParcelStream
from orca_core.errors import OrcaError, RequestCancelledError, UnavailableError
from orca_core.types import GenerationChunk


class LinkOwner(Protocol):
    """Who hears of what comes over a link. All calls come from the event loop, and none blocks."""

    def on_parcel(self, link: Link, parcel: Parcel) -> None:
        """A parcel has come; its words have not been handed on yet."""

    def on_word(self, link: Link, entry: Entry) -> None:
        """A request has been heard of: the replica has accepted it."""

    def on_end(self, link: Link, entry: Entry) -> None:
        """A request has ended on the replica; it is to be taken off the link."""

    def on_overflow(self, link: Link, entry: Entry) -> None:
        """A client lags too far behind; its request is to be taken off the link."""

    def on_news(self, link: Link) -> None:
        """All words of a parcel are handed on."""

    def on_drops(self, link: Link, attempt_ids: tuple[str, ...]) -> None:
        """The replica is to hear that nobody wants these any more."""

    def on_pace(self, link: Link, interval_s: float) -> None:
        """The replica is to hear how often we want parcels: once in ``interval_s`` seconds; 0 = as they come."""

    def on_lost(self, link: Link) -> None:
        """The replica is lost, with all that is on the link, which is closed."""


class Link:
    """The attachment to a replica. ``link_id``: under which the replica knows it.

    ``entries``: by attempt id, what is on the replica or on its way there. A word may come before the answer to the
    call that submitted its request. ``delivery``: when readers are woken. ``on_broken``: called with the reason when
    the stream has ended, failed, or said that the replica is not well.
    """

    def __init__(
        self,
        replica: str,
        link_id: str,
        stream: ParcelStream,
        owner: LinkOwner,
        on_broken: Callable[[Link, str], None],
        delivery: Delivery,
    ) -> None:
        self.replica = replica
        self.link_id = link_id
        self.entries: dict[str, Entry] = {}
        self.is_open = False
        """Whether the replica has said how it stands."""
        self.silent_s = 0.0
        """Seconds since the last parcel in which our own event loop was not the one that was late."""
        self.missed = 0
        """Polls in a row in which the replica was not among those that answer."""
        self.gone = False
        """Whether Serve has said that it does not know the replica, which no poll has contradicted since."""
        self._stream = stream
        self._owner = owner
        self._on_broken = on_broken
        self._delivery = delivery
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._to_drop: list[str] = []
        self._told_interval_s = 0.0

    def start(self) -> None:
        """Begin to read, in a context of its own: what Serve ties to a request must not be tied to this."""
        self._task = asyncio.get_running_loop().create_task(
            self._read(), context=Context(), name=f"link {self.replica}"
        )

    def close(self) -> None:
        """End the stream. Idempotent, never blocks."""
        self._closed = True
        self._delivery.close()
        self._stream.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def drop(self, attempt_id: str) -> None:
        """Nobody wants a request any more: let the replica know, in one call for all of one instant."""
        self._to_drop.append(attempt_id)
        if len(self._to_drop) == 1:
            asyncio.get_running_loop().call_soon(self._send_drops, context=Context())

    def _send_drops(self) -> None:
        dropped, self._to_drop = self._to_drop, []
        self._owner.on_drops(self, tuple(dropped))

    async def _read(self) -> None:
        reason = "its stream ended"
        try:
            async for parcel in self._stream:
                self._take(parcel)
                if self._closed:  # in the midst of it: nothing of ours was left on the replica
                    return
                if not parcel.standing.well:
                    reason = "it is not well"
                    break
        except asyncio.CancelledError:
            if self._closed:
                raise
            reason = "its stream was cancelled"
        except Exception as error:
            reason = type(error).__name__
        if not self._closed:
            self._on_broken(self, reason)

    def _take(self, parcel: Parcel) -> None:
        if self._closed:
            return
        self.silent_s = 0.0
        self.is_open = True
        self._owner.on_parcel(self, parcel)
        interval_s = self._delivery.begin()
        if interval_s != self._told_interval_s:
            self._told_interval_s = interval_s
            self._owner.on_pace(self, interval_s)
        for word in parcel.words:
            entry = self.entries.get(word[0])
            if entry is not None:
                self._hand_on(entry, unpack(word, entry.request.request_id))
        self._owner.on_news(self)

    def _hand_on(self, entry: Entry, said: GenerationChunk | OrcaError) -> None:
        self._owner.on_word(self, entry)
        if isinstance(said, GenerationChunk):
            if not self._delivery.put(entry.feed, said):
                self._owner.on_overflow(self, entry)
                entry.feed.fail(RequestCancelledError(entry.request.request_id))
                return
            is_last = said.finish_reason is not None
        else:
            # an engine that is closing or dead: the request can go on elsewhere
            lost = isinstance(said, UnavailableError)
            entry.feed.fail(ReplicaLostError(self.replica) if lost else said)
            is_last = True
        if is_last:
            self._owner.on_end(self, entry)
