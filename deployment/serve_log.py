"""What Serve logs in the ingress, without what is no failure."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_LOGGER: Final = "ray.serve"
_LEFT: Final = (GeneratorExit, asyncio.CancelledError)


class WithoutDepartures(logging.Filter):
    """Passes all but reports, with a stack, that a stream was closed or a call cancelled: its client has left.

    Serve knows no other end of a call than a result or a failure and logs each such client as an error. They are
    counted as cancelled (``orca_requests_total``); errors that somebody should read drowned in them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or not issubclass(kind, _LEFT)


def leave_out_departures() -> None:
    """For all that Serve logs in this process. A second time changes nothing."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(known, WithoutDepartures) for known in logger.filters):
        logger.addFilter(WithoutDepartures())
