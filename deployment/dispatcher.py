"""Who is sent where, and when: the waiting line on one side, the links to the replicas on the other. Free of Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextvars import Context

from deployment.dispatch_settings import DispatchSettings
from deployment.entry import Entry
from deployment.headroom import HeadroomBook
from deployment.line import WaitingLine
from deployment.link import Link
from deployment.links import Heard, Links
from deployment.metrics import IngressMetrics
from deployment.pace import Pace
from deployment.parcels import LineDepth, Parcel
from deployment.replica_set import ReplicaSet
from deployment.sender import Sender
from deployment.waker import Waker
from orca_core.errors import DeadlineExceededError, OverloadedError, UnavailableError
from orca_core.types import Load, ModelInfo

_log = logging.getLogger(__name__)


class Dispatcher:
    """Sends the head of the line to the replica with the most room, whenever there may be one.

    A request is bound to a replica only by that replica's word. Until then it has a place in the line, by its number
    (what that promises, ``WaitingLine`` says); nobody who came later is sent before it. Everything happens on one event
    loop, and between two awaits either the whole of a step or nothing of it.

    ``book``: what is known of the replicas' room. ``clock``: seconds, monotonic.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        settings: DispatchSettings,
        book: HeadroomBook,
        clock: Callable[[], float],
        metrics: IngressMetrics,
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._book = book
        self._clock = clock
        self._metrics = metrics
        self._line = WaitingLine(settings.max_waiting_requests, settings.max_waiting_slots, clock)
        pace = Pace(settings.coalesce_s, clock)
        self._links = Links(replicas, clock, settings.silence_s, self, self.line_depth, pace)
        self._sender = Sender(
            replicas, book, clock, settings.silence_s, on_return=self._wait_again, on_gone=self._links.leaves
        )
        self.waker = Waker(replicas, clock, settings.from_zero)
        self._numbers = itertools.count()
        self._returned: list[Entry] = []
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life

    def start(self) -> None:
        """Begin to poll the replicas and to watch the links; until then that is done by whoever calls."""
        loop = asyncio.get_running_loop()
        for work in (self._keep_polling(), self._keep_watching()):
            self._tasks.append(loop.create_task(work, context=Context()))

    def end_links(self) -> None:
        """Nothing will be sent any more, and nothing is on its way: let the replicas go. They are still polled."""
        self.waker.close()
        self._links.end()

    def close(self) -> None:
        """End all tasks and links. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self.waker.close()
        self._sender.close()
        self._links.close()

    async def _keep_polling(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:
                _log.exception("the replicas could not be polled")
            await asyncio.sleep(self._settings.interval_s)

    async def _keep_watching(self) -> None:
        interval_s = self._settings.interval_s
        while True:
            began = self._clock()
            await asyncio.sleep(interval_s)
            # an event loop that was late has not read what may long have been there: that time is nobody's silence
            self.tick(min(self._clock() - began, 2 * interval_s))

    async def poll(self) -> Heard:
        """Ask all replicas how they are, and take what follows from it."""
        heard = await self._links.poll()
        self._book.survey({report.replica: report.load for report in heard.reports}, heard.asked_at)
        self._book.keep({link.replica for link in self._links} | {report.replica for report in heard.reports})
        self._pump()
        self._metrics.line(self.waiting_requests, self.waiting_slots)
        return heard

    def tick(self, elapsed_s: float) -> None:
        """``elapsed_s`` seconds have passed in which the event loop was on time. Ends what has waited too long."""
        self._links.tick(elapsed_s)
        for entry in self._line.expired():
            self._line.remove(entry)
            entry.feed.fail(DeadlineExceededError(0.0))
        self._sender.tick(elapsed_s)
        self._pump()

    # ---- entries

    @property
    def heard(self) -> Heard:
        """What the replicas last said of themselves."""
        return self._links.heard

    @property
    def served_model(self) -> ModelInfo | None:
        """What the replicas serve, whoever asked them; ``None`` until one has answered."""
        return self._links.model

    @property
    def ingress_id(self) -> str:
        """Our name among the ingresses."""
        return self._links.ingress_id

    def last_told(self) -> list[tuple[str, Load, float]]:
        """Of each replica that is linked and has said something: its name, its last load, seconds since then."""
        names = [link.replica for link in self._links if link.is_open]
        return [(name, self._book.load(name), self._book.report_age_s(name)) for name in names]

    @property
    def waiting_requests(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def waiting_slots(self) -> int:
        """Their demand."""
        return self._line.slots

    def line_depth(self) -> LineDepth:
        """What the replicas, and through them the autoscaler, are told of the line."""
        return LineDepth(self._line.slots, len(self._line))

    def enter(self, entry: Entry) -> None:
        """A new request. Raises ``UnavailableError`` without any replica, unless it may wait for the first one, and
        ``OverloadedError`` (see the line).
        """
        nobody = not len(self._links) or (self.waker.works and self._links.none_stays)
        # who is not to wait is judged by what probes are told: the last poll, and not links that are about to end
        if nobody or (self.waker.works and not self.waker.may_wait and not self.heard.reports):
            self.waker.wake()
            if not self.waker.may_wait:
                raise self.waker.no_replica()
        entry.number = next(self._numbers)
        self._line.put(entry)
        self._pump()
        if entry in self._line:
            self._judge(entry)

    def come_back(self, entry: Entry) -> None:
        """An entry whose replica was lost goes to its old place in line, with what is left to generate."""
        self._line.put(entry)
        self._pump()

    def leave(self, entry: Entry) -> None:
        """Nobody wants an entry any more, wherever it is. Idempotent, never blocks."""
        self._line.remove(entry)
        if self._sender.drop(entry):
            self._line.rate.release(entry.demand)
        self._pump()

    def _wait_again(self, entry: Entry) -> None:
        """A replica has not taken it after all. Whoever says so is in the midst of something: look again after that."""
        self._line.put(entry)
        self._returned.append(entry)
        if len(self._returned) == 1:
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        """Who has come back in one instant: some have room elsewhere, and of the rest the last are refused first."""
        returned, self._returned = self._returned, []
        self._pump()
        for entry in sorted(returned, key=lambda entry: -entry.number):
            if entry in self._line and entry.accepted_at is None:
                try:
                    self._judge(entry)
                except OverloadedError as error:
                    entry.feed.fail(error)
        self._pump()  # who is refused may have been the head

    def _judge(self, entry: Entry) -> None:
        start_s = self.waker.left_s() if self._links.none_stays else None
        self._line.judge(entry, self._book.iteration_s, self._sender.on_their_way, start_s)

    # ---- sending

    def _pump(self) -> None:
        """Send from the head of the line for as long as somebody has room for the head."""
        if len(self._line):
            self._line.stand_still(not self._links.usable())
            if self._links.none_stays:
                self.waker.wake()
        while (head := self._line.head()) is not None:
            if head.deadline <= self._clock():
                self._line.remove(head)
                head.feed.fail(DeadlineExceededError(0.0))
            elif self._try(head) or self._overtake(head):
                continue
            else:
                return

    def _try(self, entry: Entry) -> bool:
        """Send an entry that fits somewhere. One that would fit nowhere, were they all idle, ends here."""
        usable = self._links.usable()
        name = self._book.best(usable, entry.demand, entry.affinity)
        link = None if name is None else self._links.get(name)
        if link is not None:
            self._line.remove(entry)
            self._metrics.chosen(self._book.report_age_s(link.replica))
            self._sender.send(entry, link)
        elif usable and entry.demand > max(self._book.n_slots(replica) for replica in usable):
            self._line.remove(entry)  # checked against all there were when it came; it must not hold up the others
            entry.feed.fail(UnavailableError("no replica that is up now can hold the request"))
        else:
            return False
        return True

    def _overtake(self, head: Entry) -> bool:
        """The head fits nowhere: whether somebody else was sent. It waits for finitely many, and cannot starve."""
        now, settings = self._clock(), self._settings
        head.blocked_since = now if head.blocked_since is None else head.blocked_since
        if now - head.blocked_since >= settings.overtaking_s or head.n_overtakers >= settings.max_overtakers:
            return False
        head.n_overtakers += 1
        if any(self._try(entry) for entry in self._line.behind_head()):
            return True
        head.n_overtakers -= 1
        return False

    # ---- what comes over a link: see LinkOwner

    def on_parcel(self, link: Link, parcel: Parcel) -> None:
        """See ``LinkOwner``."""
        if not link.gone:
            self.waker.there_is_one()
        self._book.report(link.replica, parcel.standing)

    def on_word(self, link: Link, entry: Entry) -> None:
        """See ``LinkOwner``."""
        self._sender.heard_of(entry)

    def on_end(self, link: Link, entry: Entry) -> None:
        """See ``LinkOwner``."""
        self._sender.take_off(entry)
        self._line.rate.release(entry.demand)

    def on_overflow(self, link: Link, entry: Entry) -> None:
        """See ``LinkOwner``."""
        _log.warning("request %s: its reader stalled, cancelled", entry.name)
        self._sender.drop(entry)
        self._line.rate.release(entry.demand)

    def on_news(self, link: Link) -> None:
        """See ``LinkOwner``."""
        if link.missed:
            self._links.let_go()
        self._pump()

    def on_drops(self, link: Link, attempt_ids: tuple[str, ...]) -> None:
        """See ``LinkOwner``."""
        self._replicas.drop(link.replica, link.link_id, attempt_ids)

    def on_pace(self, link: Link, interval_s: float) -> None:
        """See ``LinkOwner``."""
        self._replicas.pace(link.replica, link.link_id, interval_s)

    def on_lost(self, link: Link) -> None:
        """See ``LinkOwner``."""
        self._sender.lose(link)
        self._book.forget(link.replica)
        self._pump()
