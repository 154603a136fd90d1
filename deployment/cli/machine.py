"""What this machine has to run replicas on, found out without Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orca_core.host_memory import MemoryReading, read_host_memory

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """``n_cpus``: those this process may use, parts of one included. ``n_gpus``: those that torch can use."""

    memory: MemoryReading
    n_cpus: float
    n_gpus: int


def read_machine(with_gpus: bool) -> Machine:
    """One look. ``with_gpus``: torch, which takes seconds to import, is asked for GPUs; else there are none."""
    return Machine(read_host_memory(), count_cpus(), _count_gpus() if with_gpus else 0)


def count_cpus(cpu_max: Path = _CPU_MAX) -> float:
    """CPUs this process may run on or, where it is less, what the container's limit (cgroup v2) allows it to use."""
    there = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cpu_max.read_text().split()
        return min(there, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # there is no limit ("max"), or none that we could read
        return there


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
