"""One request's way out of the engine: written by the loop thread, read in another thread or on an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

from orca_core.errors import OrcaError
from orca_core.types import GenerationChunk, merge_chunks

logger = logging.getLogger(__name__)


class Channel:
    """The chunks of one request, in order; whoever reads late gets them coalesced into one.

    Iterating (``for`` or ``async for``) ends after the chunk with a finish reason, or raises the request's error. A
    reader of many channels listens and polls instead, and needs no task for each. A channel is never shared between
    readers. It belongs to its reader alone: ``close``, the end of a ``with`` block, or letting go of the last reference
    cancels a request that has not ended.

    ``on_drop``: called with the ticket when a channel is let go of before its end, in whatever thread that happens,
    whatever locks that thread holds: it must take none.
    """

    def __init__(
        self,
        request_id: str,
        on_close: Callable[[str], object],
        on_drop: Callable[[Ticket], object] | None = None,
    ) -> None:
        self.request_id = request_id
        self.may_stall = True
        """Whether a reader that lags behind has its request cancelled. Not if it reads one answer after the other."""
        self.ticket = Ticket(self, on_drop)
        """By this the engine knows the channel; it does not keep it alive."""
        self._on_close = on_close
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._blocked = 0  # readers that wait in a thread
        self._pending: list[GenerationChunk] = []
        self.backlog = 0
        """Tokens written and not read yet."""
        self._error: OrcaError | None = None
        self._ended = False  # the writer has said its last word
        self._read_out = False  # the reader has seen the last word
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], object] | None = None

    # ---- the loop thread's side

    def put(self, chunk: GenerationChunk) -> asyncio.AbstractEventLoop | None:
        """Append a chunk; returns the event loop that must be told (see ``wake``), if the reader waits on one."""
        with self._lock:
            if not self._ended:
                self._pending.append(chunk)
                self.backlog += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    self._ended = self.ticket.settled = True
            return self._notify() if self._blocked else self._loop

    def fail(self, error: OrcaError) -> asyncio.AbstractEventLoop | None:
        """End the request with an error; chunks before it are still delivered. Returns as ``put``."""
        with self._lock:
            if not self._ended:
                self._error = error
                self._ended = self.ticket.settled = True
            return self._notify()

    def _notify(self) -> asyncio.AbstractEventLoop | None:
        if self._blocked:
            self._ready.notify_all()
        return self._loop

    def wake(self) -> None:
        """On the reader's event loop: let it look again."""
        if self._wake is not None:
            self._wake()

    @property
    def has_ended(self) -> bool:
        """Whether the last word has been written, read or not."""
        return self._ended

    # ---- the reader's side

    def _take(self) -> GenerationChunk | None:
        """What is pending, as one chunk; ``None`` where the reader must wait. Called with the lock held."""
        if self._pending:
            chunk = self._pending[0] if len(self._pending) == 1 else merge_chunks(self._pending)
            self._pending.clear()
            self.backlog = 0
            self._read_out = chunk.finish_reason is not None
            return chunk
        if self._error is not None:
            self._read_out = True
            raise self._error
        return None

    def __iter__(self) -> Iterator[GenerationChunk]:
        return self

    def __next__(self) -> GenerationChunk:
        """Block until there is a chunk."""
        with self._ready:
            while not self._read_out:
                chunk = self._take()
                if chunk is not None:
                    return chunk
                self._blocked += 1
                try:
                    self._ready.wait()
                finally:
                    self._blocked -= 1
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self

    async def __anext__(self) -> GenerationChunk:
        """Wait on the running event loop until there is a chunk."""
        while not self._read_out:
            with self._lock:
                chunk = self._take()
                if chunk is not None:
                    return chunk
                event = asyncio.Event()
                self._loop, self._wake = asyncio.get_running_loop(), event.set
            self.ticket.waiting = self  # nobody else may hold the task that waits here
            try:
                await event.wait()
            finally:
                self.ticket.waiting = None
        raise StopAsyncIteration

    def listen(self, on_ready: Callable[[], object]) -> None:
        """Have ``on_ready`` called on the running event loop whenever there may be something to ``poll``.

        What is there already is announced too.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop, self._wake = loop, on_ready
            is_late = bool(self._pending) or self._ended
        if is_late:
            loop.call_soon(self.wake)

    def poll(self) -> GenerationChunk | None:
        """What has been written since the last look, as one chunk; ``None`` where there is nothing, or no more.

        To be called where ``on_ready`` is; never blocks. Raises the request's error, once; where that waits behind a
        chunk, ``on_ready`` is called again.
        """
        with self._lock:
            chunk = None if self._read_out else self._take()
        if chunk is not None and self._error is not None:
            self.wake()
        return chunk

    def close(self) -> None:
        """The reader leaves. Cancels the request if it has not ended. Idempotent, never blocks."""
        with self._lock:
            ended, self._ended, self._read_out = self._ended, True, True
            self.ticket.settled = True
            self._pending.clear()
            self.backlog = 0
            self._loop = self._wake = None
        if not ended:
            self._on_close(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Ticket(weakref.ref[Channel]):
    """The engine's hold on a channel: calling it gives the channel, or ``None`` once its reader has let go of it.

    Tickets are told apart by identity. ``settled``: there is nothing to cancel any more. ``waiting``: the channel while
    a task waits for it, which the event loop itself does not keep alive.
    """

    __slots__ = ("request_id", "settled", "waiting")

    request_id: str
    settled: bool
    waiting: Channel | None

    def __new__(cls, channel: Channel, on_drop: Callable[[Ticket], object] | None) -> Self:
        """``on_drop`` as in ``Channel``."""
        ticket = super().__new__(cls, channel, None if on_drop is None else _unsettled(on_drop))
        ticket.request_id = channel.request_id
        ticket.settled = False
        ticket.waiting = None
        return ticket


def _unsettled(on_drop: Callable[[Ticket], object]) -> Callable[[Ticket], None]:
    def dropped(ticket: Ticket) -> None:
        if not ticket.settled:
            on_drop(ticket)

    return dropped


class Outbox:
    """What one iteration has to say, handed over at its end and in its order.

    Kept back until then, so that whoever hears that a request has ended finds its slots free in the books; and each
    event loop is woken once an iteration, not once a token.
    """

    def __init__(self) -> None:
        self._words: list[tuple[Channel, GenerationChunk | OrcaError]] = []

    def put(self, channel: Channel, chunk: GenerationChunk) -> None:
        """Hand a chunk to a channel."""
        self._words.append((channel, chunk))

    def fail(self, channel: Channel | None, error: OrcaError) -> None:
        """End a channel with an error; ``None`` where its reader has let go of it."""
        if channel is not None:
            self._words.append((channel, error))

    def flush(self) -> None:
        """Deliver, then wake every event loop that has something to read."""
        words, self._words = self._words, []
        to_wake: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
        failure: Exception | None = None
        for channel, word in words:
            try:
                loop = channel.put(word) if isinstance(word, GenerationChunk) else channel.fail(word)
            except Exception as error:  # say what can be said to the others first
                failure = error
                continue
            if loop is None:
                continue
            try:
                to_wake[loop].append(channel)
            except KeyError:
                to_wake[loop] = [channel]
        for loop, channels in to_wake.items():
            try:
                loop.call_soon_threadsafe(_wake_all, channels)
            except RuntimeError:  # that event loop is closed: its readers are gone and will never close their channels
                for channel in channels:
                    channel.close()
        if failure is not None:
            raise failure


def _wake_all(channels: list[Channel]) -> None:
    for channel in channels:
        try:
            channel.wake()
        except (
            Exception
        ):  # a listener is its reader's code: the other readers of this event loop must hear all the same
            logger.exception("the listener of request %s failed", channel.request_id)
