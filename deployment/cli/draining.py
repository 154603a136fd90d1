"""The orderly end of a service: no new requests, and time for the open ones."""

from __future__ import annotations

import asyncio
from typing import Any, Final

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
