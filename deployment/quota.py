"""How much of an ingress one API key may hold, so that nobody's flood is everybody's wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from orca_core.errors import OverloadedError, RequestTooLargeError

CALLER: Final[ContextVar[str]] = ContextVar("orca-caller", default="")
"""Who sent the request that is handled in this context: a name for its API key, never the key; empty = nobody is told
apart. Set at the door of either face, read where a request begins: what lies between need not know of it."""

_RETRY_S: Final = 1.0
LIMIT: Final = "limits.max_slots_per_key"


class Quota:
    """Slots that are waiting or reserved, by caller. ``max_slots``: of one caller; ``None`` = no limit."""

    def __init__(self, max_slots: int | None) -> None:
        self._max_slots = max_slots
        self._held: Counter[str] = Counter()

    def largest(self) -> int | None:
        """Slots that the current caller's requests may hold together; ``None`` = as many as there are."""
        return self._max_slots if CALLER.get() else None

    @contextmanager
    def hold(self, n_prompt_tokens: int, max_new_tokens: int) -> Iterator[None]:
        """For as long as a request of the current caller is open.

        Raises ``OverloadedError`` where its other requests leave too little of its share, and ``RequestTooLargeError``
        where the share can never hold it.
        """
        caller, demand, limit = CALLER.get(), n_prompt_tokens + max_new_tokens, self._max_slots
        if not caller or limit is None:
            yield
            return
        if demand > limit:
            raise RequestTooLargeError(n_prompt_tokens, max_new_tokens, limit, LIMIT)
        if self._held[caller] + demand > limit:
            raise OverloadedError(f"the requests of this API key hold {self._held[caller]} of {limit} slots", _RETRY_S)
        self._held[caller] += demand
        try:
            yield
        finally:
            self._held[caller] -= demand
            if not self._held[caller]:
                del self._held[caller]
