"""Whether this machine can hold what a config asks for, said before anything is started."""

from __future__ import annotations

from typing import Final

from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.source import ModelSource

PROCESS_BYTES: Final = 350 * 1024 * 1024
"""RAM of a replica's process before it has loaded anything: Python, torch, Ray, the tokenizer."""

_MIB: Final = 1024 * 1024


def check_gpus(app: AppConfig, n_gpus: float) -> None:
    """Raises ``ConfigError`` where the replicas to start need more GPUs than there are: Ray would wait in silence."""
    needed = app.replicas.start * app.replicas.num_gpus
    if needed > n_gpus:
        reason = f"{app.replicas.start} replicas need {needed:g} GPUs; this machine has {n_gpus:g}"
        raise ConfigError("replicas.num_gpus", reason)


def check_memory(app: AppConfig, source: ModelSource, available_bytes: int) -> None:
    """Raises ``ConfigError`` where ``available_bytes`` cannot even hold the processes and weights of all replicas.

    The machine itself would suffer: hundreds of processes that start at once make it unusable for minutes. Weights are
    counted at the size of their files, and not at all where they go to a GPU.
    """
    each = PROCESS_BYTES + (weight_bytes(source) if app.replicas.num_gpus == 0 else 0)
    n_replicas = app.replicas.max
    if n_replicas * each > available_bytes:
        reason = (
            f"{n_replicas} replicas need at least {n_replicas * each // _MIB} MiB of RAM ({each // _MIB} each); "
            f"{available_bytes // _MIB} MiB are free"
        )
        raise ConfigError("replicas.max", reason)


def weight_bytes(source: ModelSource) -> int:
    """Size of the files that hold a model's weights."""
    if source.gguf_file is not None:
        return source.gguf_file.stat().st_size
    return sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
