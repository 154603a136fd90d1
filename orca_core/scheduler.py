"""Which requests take part in the next iteration: Algorithm 1 of the Orca paper, with a bound on the rows.

The scheduler decides and only decides: it reads the pool, asks the ledger, touches no tensor and never raises. A
request that cannot run is handed back with its error, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final, Self

from orca_core.batch import Scheduled
from orca_core.config import EngineConfig
from orca_core.errors import InternalError, OrcaError, RequestTooLargeError
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request

logger = logging.getLogger(__name__)

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each row

LOOK_AHEAD: Final = 64
"""How many waiting requests an iteration looks at, beyond as many as there are places, to find some that fit."""


@dataclass(slots=True)
class Selection:
    """The scheduler's answer: who computes how many tokens; who can never run (still in the pool), and why."""

    chosen: list[Scheduled] = field(default_factory=list)
    rejected: list[tuple[Request, OrcaError]] = field(default_factory=list)


class Verdict(Enum):
    """What became of a waiting request that was looked at."""

    ADMITTED = "admitted"
    """Its whole demand is reserved; it runs from now on."""
    BLOCKED = "blocked"
    """Its demand does not fit now; it goes on waiting."""
    REJECTED = "rejected"
    """It can never run; its error is in the selection."""


class Scheduler:
    """First come, first served, with one reservation per request at admission.

    ``max_batch_size``: requests in an iteration (``max_bs``). ``max_batch_tokens``: rows in an iteration; a prompt that
    does not fit beside the others is initiated in pieces, so increments never wait for a long prompt. Initiations share
    what the increments leave, the oldest first.

    When the oldest waiting request (the head) does not fit, nobody behind it is admitted, even if slots lie idle: they
    add up until it fits, so its wait is bounded by the length of the requests that run. ``overtaking_s`` above 0
    softens that: those behind the head that do fit may be admitted until it has been blocked for so many seconds or
    ``max_overtakers`` have passed it; after that the line is strict again until the head is admitted. So the head waits
    for finitely many requests more than without, and cannot starve.
    """

    def __init__(
        self, max_batch_size: int, max_batch_tokens: int, overtaking_s: float = 0.0, max_overtakers: int = 0
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.overtaking_s = overtaking_s
        self.max_overtakers = max_overtakers

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> Self:
        """The scheduler an engine of that configuration has on ``cpu`` or ``cuda``."""
        return cls(
            config.max_batch_size, config.batch_tokens_on(device_type), config.overtaking_s, config.max_overtakers
        )

    def select(self, pool: RequestPool, kv: KVManager, now: float) -> Selection:
        """Choose the next batch. ``now``: seconds on the engine's clock, the admission time of whoever is admitted."""
        selection = Selection()
        chosen = selection.chosen
        initiations: list[Request] = []
        for request in pool.running():
            if request.n_computed < request.n_initial:
                initiations.append(request)
            else:  # an increment: one row, in every iteration
                chosen.append(_new(Scheduled, (request, 1)))
        budget = self.max_batch_tokens - len(chosen)
        for request in initiations:
            budget = self._initiate(request, budget, selection)
        self._admit_waiting(pool, kv, now, budget, selection)
        return selection

    def _admit_waiting(self, pool: RequestPool, kv: KVManager, now: float, budget: int, selection: Selection) -> None:
        """Admit from the waiting line while there are places, rows and slots. A loop of its own: oldest first."""
        head: Request | None = None
        for request in self._candidates(pool):
            if budget <= 0 or pool.n_running >= self.max_batch_size:
                return
            verdict = self._admit(request, pool, kv, now, selection)
            if verdict is Verdict.ADMITTED:
                budget = self._initiate(request, budget, selection)
                if head is not None:
                    head.n_overtakers += 1
            elif verdict is Verdict.BLOCKED and head is None:
                head = request
                head.block(now)
            if head is not None and not self._may_be_overtaken(head, now):
                return

    def _candidates(self, pool: RequestPool) -> Iterable[Request]:
        """The waiting requests to look at: the line may be long, and an iteration is short. A copy: they leave it."""
        n_places = self.max_batch_size - pool.n_running
        return list(islice(pool.waiting(), n_places + LOOK_AHEAD)) if n_places > 0 else ()

    def _may_be_overtaken(self, head: Request, now: float) -> bool:
        blocked_since = now if head.blocked_since is None else head.blocked_since
        return now - blocked_since < self.overtaking_s and head.n_overtakers < self.max_overtakers

    @staticmethod
    def _initiate(request: Request, budget: int, selection: Selection) -> int:
        """Give a request as much of the budget as it has uncomputed tokens; returns what is left."""
        n_tokens = min(request.n_uncomputed, budget)
        if n_tokens > 0:
            selection.chosen.append(Scheduled(request, n_tokens))
        return budget - n_tokens

    @staticmethod
    def _admit(request: Request, pool: RequestPool, kv: KVManager, now: float, selection: Selection) -> Verdict:
        """Reserve the whole demand of a waiting request, if it can be had."""
        error: OrcaError
        if request.total_tokens > kv.n_slots:
            error = RequestTooLargeError(request.n_prompt_tokens, request.spec.max_new_tokens, kv.n_slots, "n_slots")
            selection.rejected.append((request, error))
            return Verdict.REJECTED
        try:
            if not kv.reserve(request.request_id, request.total_tokens, request.chain):
                return Verdict.BLOCKED
            pool.admit(request, now, kv.cached_tokens(request.request_id))
        except Exception:  # whatever it is: the others go on
            logger.exception("request %s could not be admitted", request.request_id)
            selection.rejected.append((request, InternalError(request.request_id)))
            return Verdict.REJECTED
        return Verdict.ADMITTED
