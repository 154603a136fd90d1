"""Where the autoscaler, which decides in Serve's controller, writes down what it decided, for ``status`` to read.

A policy answers Serve with a number, and what it keeps stays in the controller. So the last decision goes into the
key-value store of Ray's control plane, where Serve keeps its own state: one small entry for each application, replaced
at each decision. Whether it can be written or read is never a reason to decide differently, or not to answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from deployment.serving import ScalingStatus

_log = logging.getLogger(__name__)

NAMESPACE: Final = b"orca"
READ_TIMEOUT_S: Final = 1.0


class Note(NamedTuple):
    """A decision. ``decided_at``, ``changed_at``: wall-clock seconds. ``change``: why the number last changed; empty =
    it has not since the application was deployed.
    """

    target: int
    actual: int
    reason: str
    decided_at: float
    change: str = ""
    changed_at: float = 0.0


class Store(Protocol):
    """What is used of a key-value store; both may raise what they like."""

    def put(self, key: bytes, value: bytes) -> object:
        """Replace the value of a key."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        ...


class RayStore:
    """The store of the Ray that this process belongs to."""

    def put(self, key: bytes, value: bytes) -> None:
        """See ``Store``."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)  # noqa: SLF001 - Serve's way, there is no other

    def get(self, key: bytes) -> bytes | None:
        """See ``Store``."""
        from ray.experimental import internal_kv

        value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)  # noqa: SLF001
        return value


class ScalingBoard:
    """The entry of one application. ``wall_clock``: seconds, compared across processes."""

    def __init__(self, store: Store, app_name: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._key = f"scaling/{app_name}".encode()
        self._wall_clock = wall_clock
        self._failing = False

    def write(self, note: Note) -> None:
        """Replace the entry; a store that begins to fail is logged."""
        try:
            self._store.put(self._key, json.dumps(note).encode())
            self._failing = False
        except Exception as error:  # whatever it is: replicas matter more than what is said of them
            if not self._failing:
                _log.warning("the scaling decision was not written down: %s", type(error).__name__)
            self._failing = True

    async def read(self) -> ScalingStatus | None:
        """The last decision; ``None`` where there is none, or the store does not answer in time."""
        try:
            value = await asyncio.wait_for(asyncio.to_thread(self._store.get, self._key), READ_TIMEOUT_S)
            if value is None:
                return None
            note = Note(*json.loads(value))
        except Exception as error:
            _log.warning("the last scaling decision is not known: %s", type(error).__name__)
            return None
        now = self._wall_clock()
        changed_s = max(0.0, now - note.changed_at) if note.change else 0.0
        age_s = max(0.0, now - note.decided_at)
        return ScalingStatus(note.target, note.actual, note.reason, age_s, note.change, changed_s)
