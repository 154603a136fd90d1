"""Whether this machine can hold what a config asks for, said before anything is started."""

from __future__ import annotations

from typing import Final

from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.host_memory import MemoryReading
from orca_core.source import ModelSource

PROCESS_BYTES: Final = 350 * 1024 * 1024
"""RAM of a replica's process before it has loaded anything: Python, torch, Ray, the tokenizer."""

MIB: Final = 1024 * 1024
_ROUNDING: Final = 1e-9


def check_gpus(app: AppConfig, n_gpus: float) -> None:
    """Raises ``ConfigError`` where the replicas to start need more GPUs than there are: Ray would wait in silence."""
    if replicas_on(n_gpus, app) < app.replicas.start:
        reason = f"{needed(app.replicas.start, app.replicas.num_gpus, 'GPU')}; this machine has {n_gpus:g}"
        raise ConfigError("replicas.num_gpus", reason)


def replicas_on(n_gpus: float, app: AppConfig) -> int:
    """How many replicas so many GPUs hold. Parts of a GPU are parts of one and the same."""
    each = app.replicas.num_gpus
    if each == 0:
        return app.replicas.max
    return int(n_gpus) * int(1 / each + _ROUNDING) if each < 1 else int(n_gpus // each)


def needed(n_replicas: int, each: float, unit: str) -> str:
    """What so many replicas need, in words."""
    total = n_replicas * each
    subject = "1 replica needs" if n_replicas == 1 else f"{n_replicas} replicas need"
    return f"{subject} {total:g} {unit}{'' if total == 1 else 's'}"


def least_bytes(app: AppConfig, source: ModelSource) -> int:
    """RAM that the processes and weights of one replica take at the very least.

    Weights are counted at the size of their files, and not at all where they go to a GPU.
    """
    return PROCESS_BYTES + (weight_bytes(source) if app.replicas.num_gpus == 0 else 0)


def check_memory(app: AppConfig, source: ModelSource, memory: MemoryReading) -> None:
    """Raises ``ConfigError`` where the memory that is available cannot even hold processes and weights of all replicas.

    The machine itself would suffer: hundreds of processes that start at once make it unusable for minutes.
    """
    each, n_replicas = least_bytes(app, source), app.replicas.max
    if n_replicas * each > memory.available:
        subject = "1 replica needs" if n_replicas == 1 else f"{n_replicas} replicas need"
        apart = "" if n_replicas == 1 else f" ({each // MIB} each)"
        reason = f"{subject} at least {n_replicas * each // MIB} MiB of RAM{apart}; {available(memory)}"
        raise ConfigError("replicas.max", reason)


def available(memory: MemoryReading) -> str:
    """How much memory there is to be had, in words."""
    bound = f" ({memory.bound})" if memory.bound else ""
    return f"{memory.available // MIB} of {memory.total // MIB} MiB are available{bound}"


def weight_bytes(source: ModelSource) -> int:
    """Size of the files that hold a model's weights."""
    if source.gguf_file is not None:
        return source.gguf_file.stat().st_size
    return sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
