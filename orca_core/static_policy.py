"""Request-level scheduling, the baseline of the Orca paper (section 2) and of its figure 3: for comparisons only.

A batch is formed when nobody is running; nobody joins it, and the next one is formed when its last member has ended.
Model, kernels, executor and ledger are those of iteration-level scheduling, so that the policy is all that differs.

What it models: late joiners wait for the whole batch, and the places of members that ended early stay empty.

What it leaves out, to the baseline's advantage: a padded engine computes prompts at the length of the longest, and goes
on computing rows for members that have ended; here rows are flat, so neither costs anything. Tokens are handed on as
they are made, as tinyorca's baseline does, while the paper's request-level engine returns all results when the batch
ends. The ledger gets the slots of a member back when it ends; since nobody may join, nobody can take them.
"""

from __future__ import annotations

from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.scheduler import Scheduler, Selection, Verdict


class StaticScheduler(Scheduler):
    """Batches of up to ``max_batch_size`` requests, in arrival order, as far as their demands fit together.

    ``max_batch_tokens`` bounds the rows of an iteration as it does in ``Scheduler``: the prompts of a batch may take
    several iterations, and members whose prompt is done go on meanwhile. It does not bound the batch.
    """

    def __init__(
        self, max_batch_size: int, max_batch_tokens: int, overtaking_s: float = 0.0, max_overtakers: int = 0
    ) -> None:
        super().__init__(max_batch_size, max_batch_tokens, overtaking_s, max_overtakers)
        self._members_only = Scheduler(0, max_batch_tokens)  # a batch size of 0 admits nobody; who runs goes on

    def select(self, pool: RequestPool, kv: KVManager, now: float) -> Selection:
        """See ``Scheduler.select``."""
        formed = Selection()
        if not pool.n_running:
            self._form_batch(pool, kv, now, formed)
        selection = self._members_only.select(pool, kv, now)
        selection.rejected += formed.rejected
        return selection

    def _form_batch(self, pool: RequestPool, kv: KVManager, now: float, formed: Selection) -> None:
        """Admit the members of the next batch; those that can never run are rejected."""
        for request in list(pool.waiting()):
            if pool.n_running >= self.max_batch_size:
                break
            if self._admit(request, pool, kv, now, formed) is Verdict.BLOCKED:
                break
