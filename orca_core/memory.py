"""How many K/V slots fit: measured free memory, minus what an iteration needs, divided by the bytes of a slot."""

from __future__ import annotations

import logging
from typing import Final

from orca_core.config import EngineConfig
from orca_core.errors import InsufficientMemoryError
from orca_core.host_memory import MemoryReading
from orca_core.kv import KVManager, KVShape

logger = logging.getLogger(__name__)

DEFAULT_UTILIZATION: Final = {"cuda": 0.9, "cpu": 0.5}
"""A GPU belongs to its replica; a CPU box also runs an operating system, Ray and its user's other programs."""

_MIB: Final = 1024 * 1024


def kv_budget_cpu(reading: MemoryReading, config: EngineConfig) -> int:
    """Bytes of RAM for K and V: this engine's share of the allowed part, less what the process holds already.

    Never more than the allowed part of what is free now, so that a second process on the host is not pushed out.
    """
    utilization = config.memory_utilization or DEFAULT_UTILIZATION["cpu"]
    share = int(reading.total * utilization * config.memory_share) - reading.used_by_us
    return max(0, min(share, int(reading.available * utilization)))


def kv_budget_cuda(reading: MemoryReading, needed_beside: int, config: EngineConfig) -> int:
    """Bytes of GPU memory for K and V, at least 0.

    ``reading`` is of after the weights are loaded; ``needed_beside``: what iterations need beside weights and K/V, as
    measured. Two bounds: the engine's part of the GPU, whoever else is on it; and what is free now, less the part
    nobody may use (a tenth, or less where ``memory_utilization`` is above 0.9), so that engines that share a GPU add
    up.
    """
    utilization = config.memory_utilization or DEFAULT_UTILIZATION["cuda"]
    nobodys = int(reading.total * (1 - max(utilization, DEFAULT_UTILIZATION["cuda"])))
    share = int(reading.total * utilization) - reading.used_by_us
    return max(0, min(share, reading.available - nobodys) - needed_beside)


def decide_n_slots(
    config: EngineConfig, shape: KVShape, max_model_len: int, budget_bytes: int, device: str, *, extra_blocks: int = 0
) -> int:
    """``config.n_slots``, or what ``budget_bytes`` holds, at most what the largest batch can use. Logs the arithmetic.

    ``extra_blocks``: blocks the pool has beside those of the ledger.

    Raises ``InsufficientMemoryError`` where the budget cannot hold one block beside the pool's spare blocks.
    """
    per_slot = shape.bytes_per_slot
    block_size = config.block_size_on(device.partition(":")[0])
    spare_slots = (config.max_batch_size + extra_blocks) * block_size
    wanted = config.n_slots if config.n_slots is not None else 1
    blocks = KVManager.blocks_needed(wanted, block_size, config.max_batch_size) + extra_blocks
    if config.max_kv_bytes is not None and config.n_slots is None:
        budget_bytes = min(budget_bytes, config.max_kv_bytes)
    if blocks * block_size * per_slot > budget_bytes:
        raise InsufficientMemoryError(device, budget_bytes, blocks * block_size * per_slot)
    if config.n_slots is not None:
        logger.info("n_slots=%d as configured, %d bytes a slot", config.n_slots, per_slot)
        return config.n_slots
    room = budget_bytes // per_slot - spare_slots
    useful = config.max_batch_size * max_model_len
    n_slots = min(room, useful) // block_size * block_size
    logger.info(
        "n_slots=%d: %s has %.0f MiB for K/V, %d bytes a slot = %d slots after %d spare; "
        "max_batch_size %d x max_model_len %d can use %d",
        n_slots, device, budget_bytes / _MIB, per_slot, room, spare_slots,
        config.max_batch_size, max_model_len, useful,
    )  # fmt: skip
    return n_slots
