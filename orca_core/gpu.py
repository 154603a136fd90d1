"""What loading does only on a GPU: which attention, how much memory is left, and the graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from orca_core.attention import AttentionBackend
from orca_core.attention.cuda import VarlenAttention, why_not_varlen
from orca_core.attention.reference import ReferenceAttention
from orca_core.config import EngineConfig
from orca_core.gpu_memory import CudaMeter, GpuMeter, measure_kept, measure_peak
from orca_core.graphs import CudaGraphRunner, GraphRunner, IncrementGraphs
from orca_core.kv import KVPool
from orca_core.memory import kv_budget_cuda
from orca_core.models import Decoder
from orca_core.warmup import warm_up

logger = logging.getLogger(__name__)


def choose_attention(decoder: Decoder, block_size: int) -> AttentionBackend:
    """The fastest backend that computes this model on this GPU; why it is not the CUDA one is logged."""
    capability = torch.cuda.get_device_capability(decoder.device)
    has_flash = torch.backends.cuda.is_flash_attention_available()
    why = why_not_varlen(decoder.kv_shape, decoder.attention_specs, capability, has_flash=has_flash)
    if why is None:
        return VarlenAttention(block_size, decoder.device)
    logger.warning("attention runs in plain torch, one request after the other, without CUDA graphs: %s", why)
    return ReferenceAttention()


class GpuLoading:
    """The steps of loading that measure and capture, in order: ``kv_budget``, then ``graphs`` once the pool is there.

    ``runner``: makes a new runner; ``None`` = no graphs are wanted. After ``kv_budget``, ``extra_blocks`` says how many
    blocks the pool needs beside those of the ledger.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        attention: AttentionBackend,
        max_model_len: int,
        meter: GpuMeter,
        runner: Callable[[], GraphRunner] | None,
    ) -> None:
        self._config = config
        self._decoder = decoder
        self._attention = attention
        self._max_model_len = max_model_len
        self._meter = meter
        self._runner = runner if isinstance(attention, VarlenAttention) else None

    @property
    def extra_blocks(self) -> int:
        """1 with graphs, for what padding writes; else 0."""
        return 0 if self._runner is None else 1

    def kv_budget(self, block_size: int) -> int:
        """Bytes for K and V. Measures an iteration of the worst legal shape, and graphs by capturing them once."""
        config = self._config
        n_tokens = min(config.batch_tokens_on("cuda"), config.max_batch_size * self._max_model_len)
        peak = measure_peak(
            self._meter,
            lambda: warm_up(
                self._decoder,
                self._attention,
                n_requests=config.max_batch_size,
                n_tokens=n_tokens,
                context=self._max_model_len,
                block_size=block_size,
            ),
        )
        for_graphs = self._try_graphs(block_size)
        reading = self._meter.read()
        budget = kv_budget_cuda(reading, peak + for_graphs, config)
        logger.info(
            "GPU memory: %d MiB in all, %d free, %d held by this process; an iteration of %d requests, %d tokens "
            "needs %d, graphs %d; %d MiB for K/V",
            reading.total >> 20, reading.available >> 20, reading.used_by_us >> 20, config.max_batch_size, n_tokens,
            peak >> 20, for_graphs >> 20, budget >> 20,
        )  # fmt: skip
        return budget

    def graphs(self, pool: KVPool) -> IncrementGraphs | None:
        """Captured over the pool, whose last block is the spare one; ``None`` where there are to be none."""
        if self._runner is None or not isinstance(self._attention, VarlenAttention):
            return None
        return IncrementGraphs(
            self._decoder,
            pool,
            self._attention,
            self._runner(),
            max_batch_size=self._config.max_batch_size,
            max_context=self._max_model_len,
            spare_block=pool.n_blocks - 1,
        )

    def _try_graphs(self, block_size: int) -> int:
        """Bytes the graphs keep, which does not depend on the pool's size: measured over a pool of one block.

        Where they cannot be captured, the engine does without.
        """
        if self._runner is None:
            return 0
        pool = KVPool(self._decoder.kv_shape, 1, block_size, self._decoder.device)
        try:
            return measure_kept(self._meter, lambda: self.graphs(pool))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            logger.warning("CUDA graphs cannot be captured here, increments run without them", exc_info=True)
            self._runner = None
            return 0


def gpu_loading(config: EngineConfig, decoder: Decoder, attention: AttentionBackend, max_model_len: int) -> GpuLoading:
    """``GpuLoading`` with the real meter and runner."""
    device = decoder.device
    runner = (lambda: CudaGraphRunner(device)) if config.cuda_graphs else None
    return GpuLoading(config, decoder, attention, max_model_len, CudaMeter(device), runner)
