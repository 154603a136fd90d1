"""The orderly end of a service: no new requests, and time for the open ones."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Final

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_ANSWER_S: Final = 5.0
"""Seconds an ingress has to answer."""


async def close_doors(ingresses: Any, timeout_s: float) -> None:
    """Let every ingress refuse what is new and wait until nothing is open; after ``timeout_s`` end what is.

    Asks again and again, since an ingress that was replaced has not heard it. No answers at all at first mean that the
    handle has not been told of the ingresses yet.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    known_by = clock() + _ANSWER_S
    while True:
        n_open = await ingresses.broadcast("drain").results_async(timeout_s=_ANSWER_S)
        if (n_open or clock() > known_by) and not sum(n_open):
            return
        if clock() > deadline:
            await ingresses.broadcast("end_open").results_async(timeout_s=_ANSWER_S)
            return
        await asyncio.sleep(_POLL_S)


class Doors:
    """The ingresses of a service, met while Serve's controller, which knows them, is there: it may not be at the end.

    ``ingresses``: a handle of Serve's, which then belongs to the event loop of a thread of its own.
    """

    def __init__(self, ingresses: Any) -> None:
        self._ingresses = ingresses
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orca-doors", daemon=True)
        self._thread.start()
        try:
            self._run(self._meet())
        except Exception as error:  # they will be asked again
            _log.warning("no ingress has answered yet: %s", error)

    def close(self, timeout_s: float) -> None:
        """See ``close_doors``. Blocks. The handle is of no use then."""
        try:
            self._run(close_doors(self._ingresses, timeout_s))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _meet(self) -> None:
        await self._ingresses.broadcast("share").results_async(timeout_s=_ANSWER_S)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
