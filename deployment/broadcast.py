"""Asking all actors of a deployment at once; one that hangs holds up nobody's answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from orca_core.types import CancelOutcome

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ANSWER_TIMEOUT_S: Final = 2.0
"""An actor that does not answer within that many seconds is left out."""


async def ask_all(handle: Any, method: str, kind: type[_T], *args: object) -> list[_T]:
    """Answers of ``kind`` from the actors behind a Serve handle that give one in time; empty where there are none."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        asked = handle.broadcast(method, *args)
        # the public results_async gives all answers or none
        results = await asyncio.wait_for(asked._fetch_replica_results_async(), ANSWER_TIMEOUT_S)  # noqa: SLF001
    except (DeploymentUnavailableError, TimeoutError) as error:
        _log.log(_level(method), "nobody answered %s: %s", method, type(error).__name__)
        return []
    answers = await asyncio.gather(*(_answer(method, result) for result in results))
    return [answer for answer in answers if isinstance(answer, kind)]


def best_outcome(outcomes: Iterable[CancelOutcome]) -> CancelOutcome:
    """What a cancellation came to, of all who were asked for it."""
    found = set(outcomes)
    for outcome in (CancelOutcome.CANCELLED, CancelOutcome.ALREADY_FINISHED):
        if outcome in found:
            return outcome
    return CancelOutcome.NOT_FOUND


async def _answer(method: str, result: Any) -> object:
    """What one actor says, or ``None``."""
    try:
        return await asyncio.wait_for(result.get_async(), ANSWER_TIMEOUT_S)
    except Exception as error:  # whatever became of that one, the others have answered
        _log.log(_level(method), "somebody did not answer %s: %s", method, type(error).__name__)
        result.cancel()
        return None


def _level(method: str) -> int:
    """Reports are asked for all the time, and whoever asks says what he makes of it."""
    return logging.DEBUG if method == "report" else logging.WARNING
