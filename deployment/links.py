"""Which replicas this ingress is linked to: those that answer when all are asked, until they leave or are lost."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Final

from deployment.delivery import Delivery
from deployment.link import Link, LinkOwner
from deployment.pace import Pace
from deployment.parcels import LineDepth, ReplicaReport
from deployment.replica_set import ReplicaSet
from orca_core.types import ModelInfo

_log = logging.getLogger(__name__)

LEFT_AFTER_MISSES: Final = 2
"""Polls in a row without a replica after which it has left the set: it may only have been slow once."""

ALONE_UNTIL_MISSES: Final = 10
"""The same when nobody else answers either: Serve's controller may be restarting, and links work without it."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the replicas last said of themselves. ``asked_at``, ``at``: when they were asked and when all had answered,
    on the ingress's clock.
    """

    reports: tuple[ReplicaReport, ...] = ()
    at: float = field(default=float("-inf"))
    asked_at: float = field(default=float("-inf"))


class Links:
    """The links, by replica.

    A replica that Serve has taken out of its set, to be drained, answers no poll any more, but its parcels go on: it
    gets nothing new, and once it holds nothing of ours the link is closed, which lets it exit. One that hangs sends no
    parcels either, for ``silence_s`` seconds: it is lost, at once and with all that is on it.

    ``depth``: what the replicas are told of our line when they are asked. ``pace``: how often readers are woken.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        clock: Callable[[], float],
        silence_s: float,
        owner: LinkOwner,
        depth: Callable[[], LineDepth],
        pace: Pace,
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._silence_s = silence_s
        self._owner = owner
        self._depth = depth
        self._pace = pace
        self._links: dict[str, Link] = {}
        self._polling: asyncio.Task[Heard] | None = None
        self._ended = False
        self.ingress_id = uuid.uuid4().hex
        self.heard = Heard()
        self.model: ModelInfo | None = None
        """What the replicas serve, as the one with the most slots says; kept when there is none any more."""

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._links.values()))

    def get(self, replica: str) -> Link | None:
        """The link to a replica."""
        return self._links.get(replica)

    def usable(self) -> list[str]:
        """The replicas that may be sent something new.

        While no poll finds anybody, polls are what is wrong perhaps, and all links will do; but not one to a replica of
        which Serve says that it has left: there it would refuse to carry a call again and again.
        """
        open_ = [link for link in self._links.values() if link.is_open and not link.gone]
        present = [link.replica for link in open_ if link.missed < LEFT_AFTER_MISSES]
        return present or [link.replica for link in open_]

    @property
    def none_stays(self) -> bool:
        """Whether there is no replica, or none that Serve still has in its set: nothing can be sent, nor will be."""
        return all(link.gone for link in self._links.values())

    # ---- polls

    async def poll(self) -> Heard:
        """Ask all replicas how they are; link to new ones, let go of those that left. Who asks meanwhile shares it."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(
                self._poll(), context=Context(), name="poll replicas"
            )
        return await asyncio.shield(self._polling)

    async def _poll(self) -> Heard:
        before, asked_at = set(self._links.values()), self._clock()
        reports = await self._replicas.reports(self.ingress_id, self._depth())
        self.heard = Heard(tuple(reports), self._clock(), asked_at)
        if reports:
            self.model = max((report.info for report in reports), key=lambda info: info.n_slots)
        present = {report.replica for report in reports}
        for link in self:
            if link in before:
                link.missed = 0 if link.replica in present else link.missed + 1
                link.gone = link.gone and link.missed > 0
                if link.missed:  # it was not asked, perhaps: show it in another way that we live
                    self._replicas.drop(link.replica, link.link_id, ())
        for report in reports:
            if report.well and report.replica not in self._links and not self._ended:
                self._attach(report.replica)
        self.let_go()
        return self.heard

    def _attach(self, replica: str) -> None:
        link_id = uuid.uuid4().hex
        stream = self._replicas.attach(replica, self.ingress_id, link_id)
        link = self._links[replica] = Link(
            replica,
            link_id,
            stream,
            self._owner,
            self.lose,
            Delivery(self._pace.interval_s, self._clock, self._pace.count),
        )
        link.start()

    def let_go(self) -> None:
        """Close the links to replicas that have left and hold nothing of ours."""
        alone = all(link.missed for link in self._links.values())
        patience = ALONE_UNTIL_MISSES if alone else LEFT_AFTER_MISSES
        for link in self:
            if link.missed >= patience and not link.entries:
                self._remove(link)

    def leaves(self, replica: str) -> None:
        """Serve does not know a replica any more."""
        link = self._links.get(replica)
        if link is not None:
            link.missed, link.gone = max(link.missed, LEFT_AFTER_MISSES), True

    # ---- losses

    def tick(self, elapsed_s: float) -> None:
        """So much time has passed in which the event loop was there to read: lose those that were silent too long."""
        for link in self:
            link.silent_s += elapsed_s
            if link.silent_s > self._silence_s:
                self.lose(link, f"no sign of life for {link.silent_s:.1f} s")

    def lose(self, link: Link, reason: str) -> None:
        """A replica is lost; its owner is told once."""
        if self._links.get(link.replica) is link:
            _log.warning("replica %s is lost: %s; %d requests on it", link.replica, reason, len(link.entries))
            self._remove(link)
            self._owner.on_lost(link)

    def _remove(self, link: Link) -> None:
        del self._links[link.replica]
        link.close()

    def end(self) -> None:
        """Close all, and open none any more; polls go on. Idempotent.

        An open link is a call in progress: a replica that is asked to exit waits for its end.
        """
        self._ended = True
        for link in self:
            self._remove(link)

    def close(self) -> None:
        """Close all, and end the poll that runs. Idempotent."""
        if self._polling is not None:
            self._polling.cancel()
        self.end()
