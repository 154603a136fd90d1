"""How a service that has scaled to zero is asked for a replica. Free of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from typing import Final, Protocol

from deployment.config_sections import ColdRequests
from orca_core.errors import UnavailableError

_log = logging.getLogger(__name__)

NO_REPLICA_RETRY_S: Final = 2.0
"""When to come back if there should be a replica: loading a model takes longer, but one may be about to be ready."""

UNKNOWN_START_S: Final = 10.0
"""When to come back while no start from zero has been measured."""

RETRY_RANGE_S: Final = (0.5, 60.0)


class Sleeper(Protocol):
    """See ``deployment.replica_set.ReplicaSet``."""

    async def first(self) -> None:
        """Wait for any replica to be there; that somebody waits makes Serve start one."""


class Waker:
    """Keeps one call waiting for the first replica: all that Serve's controller hears of us while there is none.

    Once begun, it waits until there is one, whatever becomes of who wanted it: a service that somebody wanted is
    started. ``clock``: seconds, monotonic. ``from_zero``: what becomes of requests meanwhile; ``None`` = the service
    never scales to zero, nobody waits for the first replica, and nothing has to be done to get one.
    """

    def __init__(self, replicas: Sleeper, clock: Callable[[], float], from_zero: ColdRequests | None = None) -> None:
        self._replicas = replicas
        self._clock = clock
        self.works = from_zero is not None
        self.may_wait = from_zero == "wait"
        self._since: float | None = None
        self._took_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Somebody wants a replica and there is none. Idempotent, never blocks."""
        if self.works and self._task is None:
            self._since = self._clock() if self._since is None else self._since
            self._task = asyncio.get_running_loop().create_task(self._wait(), context=Context(), name="wake replicas")

    def there_is_one(self) -> None:
        """A replica has said how it stands: what that took is what it will take the next time, as far as is known."""
        if self._since is not None:
            self._took_s, self._since = self._clock() - self._since, None

    def left_s(self) -> float | None:
        """Seconds until the first replica is there, by the last start; ``None`` = no start was measured."""
        if self._took_s is None:
            return None
        return max(0.0, self._took_s - (0.0 if self._since is None else self._clock() - self._since))

    def no_replica(self) -> UnavailableError:
        """What somebody is told who finds no replica and is not to wait."""
        known_s = UNKNOWN_START_S if (left_s := self.left_s()) is None else left_s
        shortest, longest = RETRY_RANGE_S
        retry_s = min(longest, max(shortest, known_s)) if self.works else NO_REPLICA_RETRY_S
        return UnavailableError("no replica is ready yet", retry_s)

    async def _wait(self) -> None:
        try:
            await self._replicas.first()
        except Exception as error:  # whoever still wants one asks again
            _log.warning("no replica could be asked for: %s", type(error).__name__)
        finally:
            self._task = None

    def close(self) -> None:
        """Nobody wants one any more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
