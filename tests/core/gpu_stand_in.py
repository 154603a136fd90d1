"""A GPU's memory without a GPU."""

from __future__ import annotations

from orca_core.host_memory import MemoryReading

GIB = 1 << 30


class FakeMeter:
    """``GpuMeter`` whose numbers a test changes with ``use``."""

    def __init__(self, total: int = 80 * GIB) -> None:
        self.total = total
        self.allocated = 0
        self.reserved = 0
        self.beside = 0  # ours, but not the allocator's
        self.others = 0
        self._peak = (0, 0)

    def use(self, allocated: int, reserved: int, *, beside: int = 0, others: int = 0) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.beside += beside
        self.others += others
        self._peak = (max(self._peak[0], self.allocated), max(self._peak[1], self.reserved))

    def read(self) -> MemoryReading:
        return MemoryReading(self.total, self.total - self.reserved - self.beside - self.others, self.reserved)

    def settle(self) -> None:
        pass

    def in_use(self) -> tuple[int, int]:
        return self.allocated, self.reserved

    def start_peak(self) -> None:
        self._peak = (self.allocated, self.reserved)

    def peak(self) -> tuple[int, int]:
        return self._peak
