"""What one client's stream is fed from, at the ingress: bounded, coalescing, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orca_core.types import GenerationChunk, merge_chunks


class ReplicaLostError(Exception):
    """The replica that computed a stream is lost, the stream need not be. Never shown to a client."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class Feed:
    """The chunks of one attempt at a request, in order; whoever reads late gets them in one.

    ``max_backlog``: tokens that may wait for the reader. ``clock``: seconds. Times are kept when chunks come, not when
    they are read.
    """

    def __init__(self, max_backlog: int, clock: Callable[[], float]) -> None:
        self._max_backlog = max_backlog
        self._clock = clock
        self._pending: list[GenerationChunk] = []
        self._backlog = 0
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None  # the one who waits
        self.replica = ""
        self.first_at: float | None = None
        self.last_at = 0.0
        self.ended = False

    def put(self, chunk: GenerationChunk, *, hold: bool = False) -> bool:
        """Append a chunk. False, and nothing is appended, where the reader lags too far behind.

        ``hold``: the reader is not woken before ``wake``, unless this is the first chunk or the last.
        """
        if self.ended:
            return True
        if self._backlog + len(chunk.token_ids) > self._max_backlog:
            return False
        self.last_at = self._clock()
        if self.first_at is None:
            self.first_at, hold = self.last_at, False
        self._pending.append(chunk)
        self._backlog += len(chunk.token_ids)
        self.ended = chunk.finish_reason is not None
        if self.ended or not hold:
            self.wake()
        return True

    def fail(self, error: BaseException) -> None:
        """No more will come, and why. What came before is still delivered; an end that came first wins."""
        if not self.ended:
            self._error = error
            self.ended = True
            self.wake()

    def wake(self) -> None:
        """Let the reader, where it waits, see what is there."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> GenerationChunk:
        """Wait for what comes next, as the only reader. Raises the error behind the last chunk.

        Not to be called after the last chunk.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        chunk = merge_chunks(self._pending)
        self._pending.clear()
        self._backlog = 0
        return chunk
