"""Runs one batch on the device: the engine's view of a model."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from orca_core.attention import AttentionBackend
from orca_core.batch import Batch
from orca_core.graphs import IncrementGraphs
from orca_core.kernels import Kernels
from orca_core.kv import KVPool
from orca_core.models import AnyDecoder
from orca_core.request import Request
from orca_core.sampling import SampledToken, SamplingRow, sample
from orca_core.tokenizer import Tokenizer
from orca_core.types import ModelInfo

logger = logging.getLogger(__name__)

_NOTHING: Final[frozenset[int]] = frozenset()


class Executor(Protocol):
    """One forward pass at a time, called by the loop thread alone."""

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors must be."""
        ...

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """Compute all rows of the batch, then choose a token for each request in ``batch.sampling_requests``."""
        ...

    def recover(self, error: Exception) -> bool:
        """Called when ``run_iteration`` failed with ``error``, before the next one: free what it left. Never raises.

        Returns whether the next one can succeed: not where the device is lost.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine runs: somebody who computes, somebody who spells, and the facts about both."""

    executor: Executor
    tokenizer: Tokenizer
    info: ModelInfo


class ModelExecutor:
    """The real executor: a decoder, its paged pool and an attention backend.

    ``graphs``: replays batches of increments alone; ``None`` = every batch is computed layer by layer. ``kernels``:
    those of the CPU, to draw tokens with; ``None`` = torch draws.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        pool: KVPool,
        attention: AttentionBackend,
        stop_ids: frozenset[int] = frozenset(),
        graphs: IncrementGraphs | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = attention
        self._stop_ids = stop_ids
        self._graphs = graphs
        self._kernels = kernels

    @property
    def device(self) -> torch.device:
        """The decoder's device."""
        return self._decoder.device

    @torch.inference_mode()
    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """See ``Executor``. A batch of prompt pieces alone samples nothing."""
        logits = self._logits(batch)
        if logits is None:
            return []
        requests = batch.sampling_requests
        try:
            return sample(logits, [self._sampling_row(request) for request in requests], self._kernels)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.exception("sampling failed; each of the %d requests is sampled alone", len(requests))
            return [self._sample_alone(logits[i : i + 1], request) for i, request in enumerate(requests)]

    def _sample_alone(self, logits: torch.Tensor, request: Request) -> SampledToken:
        """The same token as in the batch; what fails fails for this request only."""
        try:
            return sample(logits, [self._sampling_row(request)], self._kernels)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.exception("request %s could not be sampled", request.request_id)
            return SampledToken(0, ok=False)

    def recover(self, error: Exception) -> bool:
        """See ``Executor``. After an out-of-memory error, what the failed iteration held on the device is let go.

        After an error of the device's own (``torch.AcceleratorError``: an illegal access, a failed assertion, lost
        hardware) every further call of the process fails with it (CUDA C++ Programming Guide, "Error Checking").
        """
        if isinstance(error, torch.AcceleratorError):
            return False
        if not isinstance(error, torch.OutOfMemoryError):
            return True
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            torch.cuda.empty_cache()
            after, _ = torch.cuda.mem_get_info(self.device)
            logger.warning(
                "out of GPU memory in an iteration: %d MiB of %d were free, %d are after letting go of what it used",
                free >> 20, total >> 20, after >> 20,
            )  # fmt: skip
        return True

    def _logits(self, batch: Batch) -> torch.Tensor | None:
        """Compute all rows; float32 ``[n, vocab]`` for those that sample, ``None`` where none does."""
        if self._graphs is not None and self._graphs.fits(batch):
            n_samples = batch.sample_rows.shape[0]
            logits = self._graphs.run(batch)
            if n_samples == len(batch.spans):
                return logits
            return logits.index_select(0, batch.sample_rows) if n_samples else None
        return self._decoder.next_logits(batch, self._pool, self._attention)

    def _sampling_row(self, request: Request) -> SamplingRow:
        spec, params = request.spec, request.spec.sampling
        banned = self._stop_ids.union(params.stop_token_ids) if params.min_new_tokens else _NOTHING
        # without looking back, copying all tokens for each one would be for nothing
        output_ids = request.output_ids if params.looks_back else ()
        return SamplingRow(params, spec.seed, len(request.token_ids), spec.token_ids, output_ids, banned)
