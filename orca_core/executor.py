"""Runs one batch on the device: the engine's view of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from orca_core.attention import AttentionBackend
from orca_core.batch import Batch
from orca_core.kv import KVPool
from orca_core.models import Decoder
from orca_core.request import Request
from orca_core.sampling import SampledToken, SamplingRow, sample
from orca_core.tokenizer import Tokenizer
from orca_core.types import ModelInfo


class Executor(Protocol):
    """One forward pass at a time, called by the loop thread alone."""

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors must be."""
        ...

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """Compute all rows of the batch, then choose a token for each request in ``batch.sampling_requests``."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine runs: somebody who computes, somebody who spells, and the facts about both."""

    executor: Executor
    tokenizer: Tokenizer
    info: ModelInfo


class ModelExecutor:
    """The real executor: a decoder, its paged pool and an attention backend."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, attention: AttentionBackend, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = attention
        self._stop_ids = stop_ids

    @property
    def device(self) -> torch.device:
        """The decoder's device."""
        return self._decoder.device

    @torch.inference_mode()
    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """See ``Executor``. A batch of prompt pieces alone samples nothing."""
        self._attention.prepare(batch)
        hidden = self._decoder.forward(batch, self._pool, self._attention)
        requests = batch.sampling_requests
        if not requests:
            return []
        logits = self._decoder.logits(hidden[batch.sample_rows])
        return sample(logits, [self._sampling_row(request) for request in requests])

    def _sampling_row(self, request: Request) -> SamplingRow:
        spec = request.spec
        banned = self._stop_ids.union(spec.sampling.stop_token_ids) if spec.sampling.min_new_tokens else frozenset()
        looks_back = spec.sampling.looks_back  # without it, copying all tokens for each one would be for nothing
        return SamplingRow(
            params=spec.sampling,
            seed=spec.seed,
            position=len(request.token_ids),
            prompt_ids=spec.token_ids,
            output_ids=request.output_ids if looks_back else (),
            banned_until_min=banned,
        )
