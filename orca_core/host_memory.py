"""How much RAM this machine, or this container, has to give. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_CGROUP_V2: Final = Path("/sys/fs/cgroup")
_CGROUP_V1: Final = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One look at a device, in bytes. ``used_by_us``: by this process.

    ``bound``: what ``available`` follows from, in words; empty where a device has no more than one answer.
    """

    total: int
    available: int
    used_by_us: int
    bound: str = ""


def read_host_memory(cgroup_v2: Path = _CGROUP_V2, cgroup_v1: Path = _CGROUP_V1) -> MemoryReading:
    """RAM of this machine or, where it is less, of the container's limit (cgroup v2, then v1).

    Available is the lesser of what the machine has (``MemAvailable``) and what the limit leaves.
    """
    memory = psutil.virtual_memory()
    total, available, bound = int(memory.total), int(memory.available), "MemAvailable of this machine"
    for folder, limit_name, usage_name, cache_key in (
        (cgroup_v2, "memory.max", "memory.current", "inactive_file"),
        (cgroup_v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None and limit < total:
            reclaimable = _read_stat(folder / "memory.stat", cache_key)
            left = limit - max(0, usage - reclaimable)
            if left < available:
                available, bound = left, "what the memory limit of this cgroup leaves"
            total = limit
            break
    return MemoryReading(total, max(0, available), int(psutil.Process().memory_info().rss), bound)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    try:
        fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    return int(fields.get(key, "0"))
