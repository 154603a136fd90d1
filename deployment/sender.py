"""The way of a request to its replica: sent, accepted or not, and all that can happen in between. Free of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from typing import Final

from deployment.entry import Attempt, Destination, Entry
from deployment.feed import ReplicaLostError
from deployment.headroom import HeadroomBook
from deployment.parcels import Accepted, Rejected
from deployment.replica_set import ReplicaSet
from orca_core.errors import OrcaError, UnavailableError

_log = logging.getLogger(__name__)

MAX_FAILURES: Final = 10
"""Submissions of one request that may fail. That replicas are full or lost is not its fault; a call that fails again
and again may be."""


class Sender:
    """Binds entries to links and takes them off again; the only one that writes ``Entry.place`` and ``Link.entries``.

    ``silence_s``: seconds a replica has to answer. ``on_return(entry)``: it was not accepted after all, and should wait
    again. ``on_gone(replica)``: Serve does not know it any more.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        book: HeadroomBook,
        clock: Callable[[], float],
        silence_s: float,
        *,
        on_return: Callable[[Entry], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._replicas = replicas
        self._book = book
        self._clock = clock
        self._silence_s = silence_s
        self._on_return = on_return
        self._on_gone = on_gone
        self._on_their_way: dict[str, Entry] = {}

    @property
    def on_their_way(self) -> list[Entry]:
        """Who was sent to a replica that has neither accepted it nor turned it down."""
        return list(self._on_their_way.values())

    def send(self, entry: Entry, link: Destination) -> None:
        """Book, and submit in a task of its own. Words may come before the answer to it."""
        entry.n_attempts += 1
        attempt = Attempt(f"{entry.request.request_id}.{entry.n_attempts}", link)
        entry.place, entry.feed.replica = attempt, link.replica
        link.entries[attempt.attempt_id] = entry
        self._on_their_way[attempt.attempt_id] = entry
        self._book.book(attempt.attempt_id, link.replica, entry.demand)
        attempt.task = asyncio.get_running_loop().create_task(self._submit(entry, attempt), context=Context())

    def take_off(self, entry: Entry) -> Attempt | None:
        """Take an entry off its replica in all our books; returns the attempt that was its place."""
        attempt, entry.place = entry.place, None
        if attempt is None:
            return None
        attempt.link.entries.pop(attempt.attempt_id, None)
        self._on_their_way.pop(attempt.attempt_id, None)
        self._book.release(attempt.attempt_id)
        if attempt.task is not None and attempt.task is not asyncio.current_task():
            attempt.task.cancel()
        return attempt

    def drop(self, entry: Entry) -> bool:
        """Nobody wants an entry any more: off its replica, which is to forget it too. False where it was on none."""
        attempt = self.take_off(entry)
        if attempt is not None:
            attempt.link.drop(attempt.attempt_id)
        return attempt is not None

    def heard_of(self, entry: Entry) -> None:
        """A word has come before the acceptance; the load that came with it knows of the request."""
        attempt = entry.place
        if attempt is not None and attempt.attempt_id in self._on_their_way:
            self._accept(entry, attempt, 0)

    def lose(self, link: Destination) -> None:
        """The replica is lost: what it was computing goes on elsewhere, what was on its way there waits again."""
        for attempt_id, entry in tuple(link.entries.items()):
            if attempt_id in self._on_their_way:
                self.drop(entry)  # it may have been accepted, and the replica may come back
                self._on_return(entry)
            else:
                self.take_off(entry)
                entry.feed.fail(ReplicaLostError(link.replica))

    def tick(self, elapsed_s: float) -> None:
        """So much time has passed in which answers could have been read: turn to others where there was none."""
        for entry in tuple(self._on_their_way.values()):
            attempt = entry.place
            if attempt is not None:
                attempt.silent_s += elapsed_s
                if attempt.silent_s > self._silence_s:
                    self._turned_away(entry, attempt, UnavailableError("no replica answers"))

    def close(self) -> None:
        """Give up what is on its way."""
        for entry in tuple(self._on_their_way.values()):
            self.take_off(entry)

    # ---- the task of one submission

    async def _submit(self, entry: Entry, attempt: Attempt) -> None:
        link, left_s = attempt.link, entry.deadline - self._clock()
        request = replace(entry.request, request_id=attempt.attempt_id, timeout_s=max(left_s, 0.001))
        handle = entry.handle or entry.client_request_id
        try:
            answer = await self._replicas.submit(link.replica, link.link_id, request, handle)
        except asyncio.CancelledError:
            if entry.place is not attempt:
                raise
            self._turned_away(entry, attempt, UnavailableError("the call was cancelled"))
        except Exception as error:
            if attempt.attempt_id in self._on_their_way:
                self._failed(entry, attempt, error)
        else:
            if attempt.attempt_id in self._on_their_way:
                self._answered(entry, attempt, answer)

    def _answered(self, entry: Entry, attempt: Attempt, answer: Accepted | Rejected) -> None:
        if isinstance(answer, Accepted):
            self._accept(entry, attempt, answer.number)
            return
        self._book.report(attempt.link.replica, answer.standing)
        self._book.refuse(attempt.link.replica)
        self.take_off(entry)
        self._on_return(entry)

    def _failed(self, entry: Entry, attempt: Attempt, error: Exception) -> None:
        """The call has failed, and no word has come. Whether the replica has begun the request nobody knows."""
        if isinstance(error, UnavailableError):
            self._on_gone(attempt.link.replica)
        elif isinstance(error, OrcaError):
            self.take_off(entry)
            entry.feed.fail(error)
            return
        self._turned_away(entry, attempt, error)

    def _turned_away(self, entry: Entry, attempt: Attempt, error: Exception) -> None:
        """The replica has not accepted it, or not said so: it is to forget it, and another one may have it.

        The same one only when it has said anew how it stands; and nobody, when that has happened too often.
        """
        replica = attempt.link.replica
        _log.warning("request %s was not accepted by %s: %s", entry.name, replica, type(error).__name__)
        self._book.refuse(replica)
        self._book.suspect(replica)
        self.drop(entry)
        entry.n_failures += 1
        if entry.n_failures > MAX_FAILURES:
            entry.feed.fail(error)
        else:
            self._on_return(entry)

    def _accept(self, entry: Entry, attempt: Attempt, number: int) -> None:
        del self._on_their_way[attempt.attempt_id]
        self._book.confirm(attempt.attempt_id, number)
        if entry.accepted_at is None:
            entry.accepted_at = self._clock()
