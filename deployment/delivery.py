"""When the readers of a link's streams are woken: with each parcel, or, at a pace, with some of them. Free of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final

from deployment.feed import Feed
from orca_core.types import GenerationChunk

HELD: Final = 0.5
"""Part of the interval for which chunks are held here at most.

The replica hears of the interval and lets so much time pass between two parcels by itself (``Outlet.pace``): to hold
what it has held would double the delay. What comes sooner came along with somebody's first word or last.
"""


class Delivery:
    """Hands chunks to feeds. ``interval_s()``: seconds that should lie between two parcels; 0 = each wakes readers.
    ``count(n)``: is told of each chunk's tokens.

    The first chunk of a stream and its last wake its reader at once. ``clock``: seconds. Lives on one event loop.
    """

    def __init__(
        self,
        interval_s: Callable[[], float],
        clock: Callable[[], float],
        count: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._interval_s = interval_s
        self._count = count
        self._clock = clock
        self._woken_at = float("-inf")
        self._holds = False
        self._held: list[Feed] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> float:
        """A parcel has come; its chunks follow. Returns the seconds that should lie between two parcels now."""
        interval_s, now = self._interval_s(), self._clock()
        left_s = self._woken_at + HELD * interval_s - now
        self._holds = left_s > 0
        if not self._holds:
            self._wake_all()
        elif self._timer is None:
            # a context of its own: what Serve ties to a request must not be tied to this
            self._timer = asyncio.get_running_loop().call_later(left_s, self._wake_all, context=Context())
        return interval_s

    def put(self, feed: Feed, chunk: GenerationChunk) -> bool:
        """See ``Feed.put``."""
        self._count(len(chunk.token_ids))
        if self._holds:
            self._held.append(feed)
        return feed.put(chunk, hold=self._holds)

    def _wake_all(self) -> None:
        self._woken_at = self._clock()
        self.close()

    def close(self) -> None:
        """Nothing is held any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        for feed in held:
            feed.wake()
