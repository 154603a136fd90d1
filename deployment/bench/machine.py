"""The machine a number was measured on, and how much of it somebody else was using meanwhile."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
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
        own = self._process.cpu_times()
        return time.monotonic(), _busy_s(), own.user + own.system


class TreeShares:
    """``with TreeShares() as shares``: as ``CpuShares``, where "we" are this process and all that descend from it.

    ``seconds``: on CPUs, by what a process is for (see ``role_of``). ``roles``: of processes whose names don't tell.
    ``root``: another process to start from; nothing is "ours" once it has ended.
    """

    own = 0.0
    foreign = 0.0

    def __init__(self, roles: Mapping[int, str] | None = None, root: int | None = None) -> None:
        self._roles = dict(roles or {})
        self._root = root
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        (wall, busy, earlier), (wall_now, busy_now, now) = self._before, self._read()
        for pid, (role, seconds) in now.items():
            used = seconds - earlier.get(pid, (role, 0.0))[1]
            self.seconds[role] = self.seconds.get(role, 0.0) + used
        own = sum(self.seconds.values())
        capacity = max(wall_now - wall, 1e-9) * (psutil.cpu_count() or 1)
        self.own = own / capacity
        self.foreign = max(0.0, busy_now - busy - own) / capacity

    def _read(self) -> tuple[float, float, dict[int, tuple[str, float]]]:
        """Seconds: wall clock, all CPUs busy; by process id its role and its seconds on CPUs."""
        found: dict[int, tuple[str, float]] = {}
        for process in self._tree():
            try:
                times = process.cpu_times()
                role = self._roles.get(process.pid) or role_of(" ".join(process.cmdline()))
            except psutil.Error:
                continue  # it has just ended
            found[process.pid] = (role, times.user + times.system)
        return time.monotonic(), _busy_s(), found

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._root)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def role_of(command: str) -> str:
    """What a process is for, from its command line: a deployment's name, HAProxy, or the rest of Ray and us."""
    if "haproxy" in command.partition(" ")[0]:
        return "HAProxy"
    if command.startswith("ray::ServeReplica:"):
        return command.split(maxsplit=1)[0].rpartition(":")[2].partition(".")[0]
    return "rest"


def _busy_s() -> float:
    """Seconds all CPUs were busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # guests are counted in user and nice already
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))
