"""The log files of Serve's actors: what we have to say is in them, at once, and not what is no failure."""

from __future__ import annotations

import asyncio
import logging
from logging.handlers import MemoryHandler
from typing import Final

_LOGGER: Final = "ray.serve"
_OURS: Final = ("deployment", "orca_core")
_HOUSEKEEPING: Final = tuple(f"CALL {method} OK " for method in ("report", "drop", "pace"))
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


class WithoutHousekeeping(logging.Filter):
    """Passes all but Serve's lines on calls by which ingresses and replicas keep up with each other, if they went well.

    Each ingress asks each replica twice a second, for ever; what fails there is still logged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        return not (hasattr(record, "serve_access_log") and record.getMessage().startswith(_HOUSEKEEPING))


def leave_out_departures() -> None:
    """For all that Serve logs in this process. A second time changes nothing."""
    _filter_once(WithoutDepartures)


def leave_out_housekeeping() -> None:
    """For all that Serve logs in this process. A second time changes nothing."""
    _filter_once(WithoutHousekeeping)


def _filter_once(kind: type[logging.Filter]) -> None:
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(known, kind) for known in logger.filters):
        logger.addFilter(kind())


class ToServe(logging.Handler):
    """Hands records to Serve's logger, whichever handlers that has by then, and has them written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Into the file of this actor."""
        serve = logging.getLogger(_LOGGER)
        serve.handle(record)
        for handler in serve.handlers:
            handler.flush()


def join_serve_log() -> None:
    """What this package and the engine log from ``INFO`` on is in the file of the actor. A second time changes nothing.

    Serve's throughput mode keeps a thousand lines, errors apart, before it writes any: as many as an actor may log in
    its life. Here hardly anything is logged for a request, so there is nothing to save.
    """
    for handler in logging.getLogger(_LOGGER).handlers:
        if isinstance(handler, MemoryHandler):
            handler.capacity = 1
            handler.flush()
    for name in _OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, ToServe) for known in logger.handlers):
            logger.addHandler(ToServe())
            logger.setLevel(logging.INFO)
            logger.propagate = False  # Serve turns what goes to stderr into lines of its own
