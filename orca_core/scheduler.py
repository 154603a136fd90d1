"""Which requests take part in the next iteration: Algorithm 1 of the Orca paper, with a bound on the rows.

The scheduler decides and only decides: it reads the pool, asks the ledger, touches no tensor and never raises. A
request that cannot run is handed back with its error, and the others go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from orca_core.batch import Scheduled
from orca_core.errors import InternalError, OrcaError, RequestTooLargeError
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Selection:
    """The scheduler's answer: who computes how many tokens; who can never run (still in the pool), and why."""

    chosen: list[Scheduled] = field(default_factory=list)
    rejected: list[tuple[Request, OrcaError]] = field(default_factory=list)


class Scheduler:
    """First come, first served, with one reservation per request at admission.

    ``max_batch_size``: requests in an iteration (``max_bs``). ``max_batch_tokens``: rows in an iteration; a prompt that
    does not fit beside the others is initiated in pieces, so increments never wait for a long prompt.
    """

    def __init__(self, max_batch_size: int, max_batch_tokens: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens

    def select(self, pool: RequestPool, kv: KVManager, now: float) -> Selection:
        """Choose the next batch. ``now``: seconds on the engine's clock, the admission time of whoever is admitted."""
        selection = Selection()
        budget = self.max_batch_tokens
        initiations: list[Request] = []
        for request in pool.running():
            if request.in_initiation or request.n_uncomputed > 1:
                initiations.append(request)
            else:  # an increment: one row, in every iteration
                selection.chosen.append(Scheduled(request, 1))
                budget -= 1
        for request in initiations:
            budget = self._initiate(request, budget, selection)
        # admission is a loop of its own: oldest first, and nobody overtakes a head that does not fit
        for request in list(pool.waiting()):
            if budget <= 0 or pool.n_running >= self.max_batch_size:
                break
            verdict = self._admit(request, pool, kv, now)
            if verdict is None:
                break
            if isinstance(verdict, OrcaError):
                selection.rejected.append((request, verdict))
            else:
                budget = self._initiate(request, budget, selection)
        return selection

    @staticmethod
    def _initiate(request: Request, budget: int, selection: Selection) -> int:
        """Give a request as much of the budget as it has uncomputed tokens; returns what is left."""
        n_tokens = min(request.n_uncomputed, budget)
        if n_tokens > 0:
            selection.chosen.append(Scheduled(request, n_tokens))
        return budget - n_tokens

    @staticmethod
    def _admit(request: Request, pool: RequestPool, kv: KVManager, now: float) -> OrcaError | bool | None:
        """Reserve the whole demand. True: admitted; None: not now, wait; an error: never."""
        if request.total_tokens > kv.n_slots:
            return RequestTooLargeError(request.n_prompt_tokens, request.spec.max_new_tokens, kv.n_slots, "n_slots")
        try:
            if not kv.reserve(request.request_id, request.total_tokens):
                return None
            pool.admit(request, now)
        except OrcaError:
            logger.exception("request %s could not be admitted", request.request_id)
            return InternalError(request.request_id)
        return True
