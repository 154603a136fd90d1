"""What a GPU's memory holds: reading it, waiting for it to come free, and what a computation takes of it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from orca_core.config import EngineConfig
from orca_core.errors import InsufficientMemoryError
from orca_core.host_memory import MemoryReading
from orca_core.memory import DEFAULT_UTILIZATION

logger = logging.getLogger(__name__)

MAX_WAIT_S: Final = 60.0
"""Longest wait for the memory of a process that is on its way out."""
PATIENCE_S: Final = 5.0
"""Seconds without any memory coming free after which whoever holds it is taken to be there to stay."""
_POLL_S: Final = 0.5
_NOISE: Final = 16 << 20
"""Bytes; a smaller change of free memory is nobody leaving."""

_TRIED: Final = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class GpuMeter(Protocol):
    """Reads one GPU's memory. ``CudaMeter`` is the real one."""

    def read(self) -> MemoryReading:
        """The GPU now; ``used_by_us``: held by torch's allocator, in use or cached."""
        ...

    def settle(self) -> None:
        """Wait for the device, and give cached memory back."""

    def in_use(self) -> tuple[int, int]:
        """Bytes in tensors, and bytes the allocator holds for them."""
        ...

    def start_peak(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> tuple[int, int]:
        """The largest of each of ``in_use`` since ``start_peak``."""
        ...


class CudaMeter:
    """``GpuMeter`` over ``torch.cuda``. ``mem_get_info`` counts every process, the allocator only this one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        """See ``GpuMeter``."""
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device))

    def settle(self) -> None:
        """See ``GpuMeter``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def in_use(self) -> tuple[int, int]:
        """See ``GpuMeter``."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def start_peak(self) -> None:
        """See ``GpuMeter``."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> tuple[int, int]:
        """See ``GpuMeter``."""
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)


def measure_peak(meter: GpuMeter, run: Callable[[], object]) -> int:
    """Bytes that ``run`` needs at most while it runs, beside what is in use before.

    The larger growth of tensors and of the allocator's memory: the second also counts what is lost between tensors, the
    first what fitted into holes of blocks that were held already.
    """
    meter.settle()
    before = meter.in_use()
    meter.start_peak()
    run()
    peak = max(0, *(after - start for after, start in zip(meter.peak(), before, strict=True)))
    meter.settle()
    return peak


def measure_kept(meter: GpuMeter, make: Callable[[], object]) -> int:
    """Bytes that what ``make`` returns keeps, in the allocator or, as graphs do, beside it; it is let go again."""
    meter.settle()
    before = meter.read()
    kept = make()
    meter.settle()
    after = meter.read()
    del kept
    meter.settle()
    return max(0, before.available - after.available, after.used_by_us - before.used_by_us)


def wait_for_memory(
    read: Callable[[], MemoryReading],
    config: EngineConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> MemoryReading:
    """Before loading: wait while less than the engine's part of the GPU is free: its predecessor may still be exiting.

    Not for ever: whoever gives nothing back for ``PATIENCE_S`` stays, and after ``MAX_WAIT_S`` it has to do as it is.
    """
    utilization = config.memory_utilization or DEFAULT_UTILIZATION["cuda"]
    reading = read()
    wanted = int(reading.total * utilization)
    started = changed_at = clock()
    if reading.available < wanted:
        logger.warning(
            "%d MiB of the GPU are free, this engine's part is %d of %d; waiting for another process to let go",
            reading.available >> 20, wanted >> 20, reading.total >> 20,
        )  # fmt: skip
    while reading.available < wanted and clock() - changed_at < PATIENCE_S and clock() - started < MAX_WAIT_S:
        sleep(_POLL_S)
        now = read()
        if now.available > reading.available + _NOISE:
            changed_at = clock()
        reading = now
    if reading.available < wanted:
        logger.warning(
            "after %.0f s other processes hold %d MiB of the GPU, %d are free: going on with those",
            clock() - started, (reading.total - reading.available) >> 20, reading.available >> 20,
        )  # fmt: skip
    return reading


@contextmanager
def out_of_memory_with_numbers(device: torch.device, read: Callable[[], MemoryReading]) -> Iterator[None]:
    """Turns torch's out-of-memory error, while an engine starts, into ``InsufficientMemoryError``.

    Its numbers: what this process holds and what is free; what it holds and what it asked for in vain.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reading = read()
        tried = _TRIED.search(str(error))
        asked = int(float(tried[1]) * _UNITS[tried[2]]) if tried else 0
        available = reading.used_by_us + reading.available
        needed = max(reading.used_by_us + asked, available + 1)
        raise InsufficientMemoryError(str(device), available, needed, "weights, activations and K/V") from error
