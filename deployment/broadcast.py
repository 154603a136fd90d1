"""Asking all actors of a deployment at once; one that hangs holds up nobody's answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from orca_core.types import CancelOutcome

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ANSWER_TIMEOUT_S: Final = 2.0
"""An actor that does not answer within that many seconds is left out."""


class Answers(NamedTuple, Generic[_T]):
    """``said``: by those that answered in time; ``n_asked``: how many were asked, 0 where nobody was reached."""

    said: list[_T]
    n_asked: int


async def ask_each(
    handle: Any, method: str, kind: type[_T], *args: object, timeout_s: float | None = None
) -> Answers[_T]:
    """Answers of ``kind`` from the actors behind a Serve handle that give one in time.

    ``timeout_s``: seconds for each; ``None`` = ``ANSWER_TIMEOUT_S``.
    """
    from ray.serve.exceptions import DeploymentUnavailableError

    limit_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        asked = handle.broadcast(method, *args)
        # the public results_async gives all answers or none
        results = await asyncio.wait_for(asked._fetch_replica_results_async(), limit_s)  # noqa: SLF001
    except (DeploymentUnavailableError, TimeoutError) as error:
        _log.log(_level(method), "nobody answered %s: %s", method, type(error).__name__)
        return Answers([], 0)
    answers = await asyncio.gather(*(_answer(method, result, limit_s) for result in results))
    return Answers([answer for answer in answers if isinstance(answer, kind)], len(results))


async def ask_all(handle: Any, method: str, kind: type[_T], *args: object) -> list[_T]:
    """The same without the count; empty where nobody answers."""
    return (await ask_each(handle, method, kind, *args)).said


def best_outcome(outcomes: Iterable[CancelOutcome]) -> CancelOutcome:
    """What a cancellation came to, of all who were asked for it."""
    found = set(outcomes)
    for outcome in (CancelOutcome.CANCELLED, CancelOutcome.ALREADY_FINISHED):
        if outcome in found:
            return outcome
    return CancelOutcome.NOT_FOUND


async def _answer(method: str, result: Any, timeout_s: float) -> object:
    """What one actor says, or ``None``."""
    try:
        return await asyncio.wait_for(result.get_async(), timeout_s)
    except Exception as error:  # whatever became of that one, the others have answered
        _log.log(_level(method), "somebody did not answer %s: %s", method, type(error).__name__)
        result.cancel()
        return None


def _level(method: str) -> int:
    """Reports are asked for all the time, and whoever asks says what he makes of it."""
    return logging.DEBUG if method == "report" else logging.WARNING
