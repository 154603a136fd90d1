"""The machine a number was measured on, and how much of it somebody else was using meanwhile."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil


def describe_machine() -> dict[str, Any]:
    """Processor, memory and versions, as plain JSON values."""
    import torch

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "logical_cpus": psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": cuda,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "orca_serve": _own_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _own_version() -> str:
    try:
        return version("orca-serve")
    except PackageNotFoundError:
        return "not installed"


class CpuShares:
    """``with CpuShares() as shares``: how much of all CPUs this process and the others used, 0 to 1."""

    own = 0.0
    foreign = 0.0

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        wall, busy, own = (after - before for after, before in zip(self._read(), self._before, strict=True))
        capacity = max(wall, 1e-9) * (psutil.cpu_count() or 1)
        self.own = own / capacity
        self.foreign = max(0.0, busy - own) / capacity

    def _read(self) -> tuple[float, float, float]:
        """Seconds: wall clock, all CPUs busy, this process on CPUs."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guests are counted in user and nice already
        busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        return time.monotonic(), busy, own.user + own.system
