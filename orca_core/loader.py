"""From an ``EngineConfig`` to a model that is loaded, warmed up and has its K/V pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from orca_core.attention import AttentionBackend
from orca_core.config import EngineConfig
from orca_core.cpu import choose_compute
from orca_core.errors import ConfigError, ModelLoadError
from orca_core.executor import LoadedModel, ModelExecutor
from orca_core.gpu import GpuLoading, choose_attention, gpu_loading
from orca_core.gpu_memory import CudaMeter, out_of_memory_with_numbers, wait_for_memory
from orca_core.host_memory import read_host_memory
from orca_core.kernels import Kernels
from orca_core.kv import KVManager, KVPool
from orca_core.memory import decide_n_slots, kv_budget_cpu
from orca_core.models import AnyDecoder, open_model
from orca_core.models.weight_cache import WeightCache, weights_cache
from orca_core.source import ModelSource, resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.types import ModelInfo
from orca_core.warmup import warm_up

logger = logging.getLogger(__name__)


def load_engine_model(config: EngineConfig) -> LoadedModel:
    """Load weights and tokenizer, measure the memory that is left, and lay out the pool in it.

    Raises ``ModelLoadError``, ``ConfigError`` and ``InsufficientMemoryError``.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    config.check_device(device.type)  # before anything is loaded
    source = resolve_source(config.model, config.revision)
    tokenizer = Tokenizer.load(source)
    if device.type != "cuda":
        return _load(config, source, tokenizer, device)
    meter = CudaMeter(device)
    wait_for_memory(meter.read, config)
    with out_of_memory_with_numbers(device, meter.read):
        return _load(config, source, tokenizer, device)


def _load(config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, device: torch.device) -> LoadedModel:
    started = time.monotonic()
    opened = open_model(
        source, dtype=config.dtype, device=device, max_model_len=config.max_model_len, quantization=config.quantization
    )
    block_size = config.block_size_on(device.type)
    max_model_len = opened.frame.config.max_position_embeddings
    decoder: AnyDecoder
    attention: AttentionBackend
    gpu: GpuLoading | None = None
    kernels: Kernels | None = None
    if device.type == "cuda":
        loaded = opened.decoder()
        decoder, attention = loaded, choose_attention(loaded, block_size)
        gpu = gpu_loading(config, loaded, attention, max_model_len)
    else:
        decoder, attention, kernels = choose_compute(opened, WeightCache(weights_cache()))
    budget = _kv_budget_cpu(config, decoder, attention, block_size) if gpu is None else gpu.kv_budget(block_size)
    extra_blocks = 0 if gpu is None else gpu.extra_blocks
    n_slots = decide_n_slots(config, decoder.kv_shape, max_model_len, budget, str(device), extra_blocks=extra_blocks)
    n_blocks = KVManager.blocks_needed(n_slots, block_size, config.max_batch_size) + extra_blocks
    pool = KVPool(decoder.kv_shape, n_blocks, block_size, device)
    graphs = None if gpu is None else gpu.graphs(pool)
    eos_ids = _known_eos_ids(config.model, {*decoder.config.eos_ids, *tokenizer.eos_ids}, decoder.config.vocab_size)
    info = ModelInfo(
        model_id=config.model,
        architecture=decoder.config.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        vocab_size=decoder.config.vocab_size,
        max_model_len=max_model_len,
        n_slots=n_slots,
        eos_ids=eos_ids,
        has_chat_template=tokenizer.has_chat_template,
    )
    logger.info(
        "loaded %s: %s, %s, %d million parameters in %d MiB, on %s, in %.1f s",
        config.model, info.architecture, info.dtype, decoder.n_parameters // 10**6, decoder.weight_bytes >> 20, device,
        time.monotonic() - started,
    )  # fmt: skip
    executor = ModelExecutor(decoder, pool, attention, frozenset(eos_ids), graphs, kernels)
    return LoadedModel(executor, tokenizer, info)


def pick_device(name: str) -> torch.device:
    """The torch device for ``config.device``. Raises ``ConfigError`` where cuda is asked for and there is none."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device", "cuda was asked for, but torch sees no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda and name != "cpu" else torch.device("cpu")


def _known_eos_ids(model: str, ids: Collection[int], vocab_size: int) -> tuple[int, ...]:
    """In order, without those that the model cannot say: some configurations name -1, or a token of another model."""
    unknown = sorted(i for i in ids if not 0 <= i < vocab_size)
    if unknown:
        logger.warning("%s: eos ids %s are outside its vocabulary of %d, left out", model, unknown, vocab_size)
    return tuple(sorted(i for i in ids if 0 <= i < vocab_size))


def _kv_budget_cpu(config: EngineConfig, decoder: AnyDecoder, attention: AttentionBackend, block_size: int) -> int:
    """Bytes of RAM for K and V, measured after the weights are in place.

    RAM is not profiled: activations are small beside the half of it that is left alone.
    """
    if not warm_up(decoder, attention, n_requests=1, n_tokens=4, context=4, block_size=block_size):
        raise ModelLoadError(config.model, "its logits are not finite: are there NaN or infinities among its weights?")
    reading = read_host_memory()
    budget = kv_budget_cpu(reading, config)
    logger.info(
        "RAM: %d MiB in all, %d free, %d held by this process; %d MiB for K/V",
        reading.total >> 20, reading.available >> 20, reading.used_by_us >> 20, budget >> 20,
    )  # fmt: skip
    return budget
