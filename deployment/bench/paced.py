"""A replica whose engine has no model: iterations take the time they are told to, tokens follow from seed and position.

Everything else is real: scheduler, ledger, loop, detokeniser, channels, the whole serving plane. For benchmarks of that
plane, and for tests that must be quick and know every token beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from deployment.metrics import ReplicaMetrics
from deployment.outlet import ReplicaEngine
from deployment.served_replica import ServedReplica
from orca_core.batch import Batch
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel
from orca_core.sampling import SampledToken
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.types import ModelInfo

N_SLOTS: Final = 65_536
MAX_MODEL_LEN: Final = 8192
_FIRST_WORD: Final = 1000  # ids below may be special
_N_WORDS: Final = 5000


def token_at(seed: int, position: int) -> int:
    """The token of a request of that seed at that place, counted from the start of its prompt."""
    return _FIRST_WORD + (seed * 7919 + position * 104_729) % _N_WORDS


class PacedExecutor:
    """An ``Executor`` that waits. ``iteration_s``: seconds; 0 = as fast as the loop goes.

    ``token_s``: seconds from one token to the next, over all requests, whatever the batch: an iteration begins when the
    tokens of the one before have taken their time, so the first one after a pause begins at once.
    """

    def __init__(self, iteration_s: float, token_s: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self._iteration_s = iteration_s
        self._token_s = token_s
        self._free_at = 0.0

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """See ``Executor``."""
        if self._iteration_s:
            time.sleep(self._iteration_s)
        if self._token_s:
            self._keep_pace(len(batch.sampling_requests))
        return [SampledToken(token_at(r.spec.seed, len(r.token_ids))) for r in batch.sampling_requests]

    def _keep_pace(self, n_tokens: int) -> None:
        now = time.monotonic()
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(self._free_at, now) + self._token_s * n_tokens

    def recover(self, error: Exception) -> bool:
        """See ``Executor``: there is nothing to free."""
        return True


def paced_engine(config: EngineConfig, metrics: ReplicaMetrics, iteration_s: float, token_s: float = 0.0) -> Engine:
    """An engine with the tokenizer of ``config.model`` and no model; what would be measured has a default."""
    tokenizer = Tokenizer.load(resolve_source(config.model, config.revision))
    info = ModelInfo(
        model_id=config.model,
        architecture="none",
        dtype="none",
        vocab_size=tokenizer.vocab_size,
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        n_slots=config.n_slots or N_SLOTS,
        eos_ids=tokenizer.eos_ids,
        has_chat_template=tokenizer.has_chat_template,
    )
    model = LoadedModel(PacedExecutor(iteration_s, token_s), tokenizer, info)
    return Engine(replace(config, device="cpu"), model=model, on_iteration=metrics.on_iteration)


def paced_replica(iteration_s: float, token_s: float = 0.0) -> type[ServedReplica]:
    """A class for ``deployment.app.application``."""

    class PacedReplica(ServedReplica):
        @staticmethod
        def make_engine(config: EngineConfig, metrics: ReplicaMetrics) -> ReplicaEngine:
            return paced_engine(config, metrics, iteration_s, token_s)

    return PacedReplica
