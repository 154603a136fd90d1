"""Whose the running version of an application is: of several ``up`` on one cluster, the last one's.

Each change of ``args`` is another ``up --address``, and the ones before stay in the foreground. Whoever of them is
ended must not take away what another has deployed since.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from deployment.scaling_board import Store


class Ownership:
    """One ``up`` and its application. A store that fails changes nothing: then it is whose it would be without it."""

    def __init__(self, store: Store, app_name: str) -> None:
        self._store = store
        self._key = f"owner/{app_name}".encode()
        self._mine = secrets.token_hex(16).encode()
        self._before: bytes | None = None

    def take(self) -> None:
        """From now on it is this one's."""
        with suppress(Exception):
            self._before = self._store.get(self._key)
            self._store.put(self._key, self._mine)

    def give_back(self) -> None:
        """It is whose it was before ``take``: what was to be deployed did not come up."""
        with suppress(Exception):
            if self._before is not None and self._store.get(self._key) == self._mine:
                self._store.put(self._key, self._before)

    def is_lost(self) -> bool:
        """Whether another one has deployed since."""
        with suppress(Exception):
            owner = self._store.get(self._key)
            return owner is not None and owner != self._mine
        return False
