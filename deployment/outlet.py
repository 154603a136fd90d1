"""A replica's end of the stream to one ingress: the words of many requests leave it together, once an iteration."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Final, Protocol, TypeVar

from deployment.parcels import Parcel, Standing, Word, pack
from orca_core.errors import OrcaError
from orca_core.types import CancelOutcome, GenerationChunk, GenerationRequest, Health, Load, ModelInfo

_T = TypeVar("_T")

N_REMEMBERED: Final = 4096
"""How many request ids an outlet can still tell from new ones."""

LONGEST_PACE_S: Final = 1.0
"""Seconds between two parcels at most, whatever an ingress asks for."""


class EngineChannel(Protocol):
    """What is read from an engine: see ``orca_core.channel.Channel``."""

    def listen(self, on_ready: Callable[[], object]) -> None:
        """Be told on the running event loop when there may be something to poll."""

    def poll(self) -> GenerationChunk | None:
        """What has been written since the last look; raises the request's error, and tells again if it waits behind."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the last word has been written, read or not."""
        ...

    def close(self) -> None:
        """The reader leaves; a request that has not ended is cancelled."""


class ReplicaEngine(Protocol):
    """What a replica needs of an engine: see ``orca_core.engine.Engine``."""

    def start(self) -> object:
        """Load the model and start; may take minutes."""

    def info(self) -> ModelInfo:
        """The model."""
        ...

    def submit(self, request: GenerationRequest) -> EngineChannel:
        """Begin a request."""
        ...

    def cancel(self, request_id: str) -> CancelOutcome:
        """End a request."""
        ...

    def load(self) -> Load:
        """Slots and counts."""
        ...

    def health(self) -> Health:
        """Whether it makes progress."""
        ...

    def close(self, drain_timeout_s: float = 0.0) -> None:
        """End everything."""


class Outlet:
    """The requests of one link. No task and no wake-up for each: who has news is polled when the next parcel is made.

    ``ask``: the engine's load and whether it is well. ``cancel(request_id)``: ends a request in the engine.
    ``on_end(request_id)``: called once for each that was added, when it has ended, whichever way. ``clock``: monotonic
    seconds. Lives on one event loop.
    """

    def __init__(
        self,
        ask: Callable[[], tuple[Load, bool]],
        cancel: Callable[[str], object],
        on_end: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._cancel = cancel
        self._on_end = on_end
        self._clock = clock
        self._channels: dict[str, EngineChannel] = {}
        self._ready: dict[str, None] = {}  # whose turn it is, in the order in which they spoke
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._n_accepted = 0
        self._news = asyncio.Event()
        self._pace_s = 0.0
        self._mute: set[str] = set()  # those that have not said anything yet
        self._timer: asyncio.TimerHandle | None = None
        self._made_at = 0.0  # the last parcel, on the event loop's clock
        self.closed = False

    def __len__(self) -> int:
        return len(self._channels)

    # ---- requests

    def number_of(self, request_id: str) -> int | None:
        """The number under which a request was accepted here before."""
        return self._numbers.get(request_id)

    def is_dropped(self, request_id: str) -> bool:
        """Whether nobody wants a request any more; that may be known before it arrives."""
        return request_id in self._dropped

    def add(self, request_id: str, channel: EngineChannel) -> int:
        """Take in a request that the engine has accepted; returns its number."""
        self._n_accepted += 1
        _remember(self._numbers, request_id, self._n_accepted)
        self._channels[request_id] = channel
        self._mute.add(request_id)
        channel.listen(lambda: self._speak(request_id))
        return self._n_accepted

    def drop(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these requests any more: end them, or refuse them should they arrive only now."""
        for request_id in request_ids:
            _remember(self._dropped, request_id, None)
            if request_id in self._channels:
                self._cancel(request_id)  # its last word is not passed on, but wakes us: its slots are free then

    def close(self) -> None:
        """Nobody reads here any more: all requests end. Idempotent."""
        self.closed = True
        channels, self._channels = self._channels, {}
        for request_id, channel in channels.items():
            channel.close()
            self._on_end(request_id)
        self._send_now()

    # ---- parcels

    @property
    def pace_s(self) -> float:
        """Seconds that what is said may wait; 0 = none."""
        return self._pace_s

    def pace(self, interval_s: float) -> None:
        """From now on ``interval_s`` seconds lie between two parcels; 0 = they leave as there is news.

        The first word of a request and the last never wait, and whatever waits goes with them.
        """
        self._pace_s = min(max(interval_s, 0.0), LONGEST_PACE_S)
        if self._timer is not None:  # nothing waits longer than was promised when it was said
            self._send_now()

    def tell(self) -> None:
        """Send a parcel soon, be it only to say how the replica stands."""
        self._send_now()

    async def parcels(self) -> AsyncGenerator[Parcel, None]:
        """The first one at once, then one whenever there is news; ends when the outlet is closed, and closes it."""
        try:
            while not self.closed:
                self._news.clear()
                self._made_at = asyncio.get_running_loop().time()
                yield self._make()
                await self._news.wait()
        finally:
            self.close()

    def standing(self) -> Standing:
        """How the replica stands now."""
        load, well = self._ask()
        return Standing(load, self._clock(), self._n_accepted, well)

    def _speak(self, request_id: str) -> None:
        self._ready[request_id] = None
        if not self._pace_s or request_id in self._mute:
            self._send_now()
            return
        channel = self._channels.get(request_id)
        if channel is None or channel.has_ended:
            self._send_now()
        elif self._timer is None and not self._news.is_set():
            due_at = self._made_at + self._pace_s
            self._timer = asyncio.get_running_loop().call_at(due_at, self._send_now)

    def _send_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._news.set()

    def _make(self) -> Parcel:
        """What has been said since the last parcel. The words are taken first, so that the load is no older."""
        ready, self._ready = self._ready, {}
        words: list[Word] = []
        for request_id in ready:
            self._hear(request_id, words)
        return Parcel(self.standing(), tuple(words))

    def _hear(self, request_id: str, words: list[Word]) -> None:
        """Append what a request has to say."""
        channel = self._channels.get(request_id)
        if channel is None:
            return
        word: Word
        try:
            chunk = channel.poll()
            if chunk is None:
                return
            word, is_last = pack(chunk), chunk.finish_reason is not None
        except OrcaError as error:
            word, is_last = (request_id, error), True
        self._mute.discard(request_id)
        if request_id not in self._dropped:
            words.append(word)
        if is_last:
            del self._channels[request_id]
            self._on_end(request_id)


def _remember(memory: OrderedDict[str, _T], key: str, value: _T) -> None:
    memory[key] = value
    if len(memory) > N_REMEMBERED:
        memory.popitem(last=False)
