"""What a config needs of this machine, looked at before anything is started: files, the model's limits, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployment.auth import FIELD, read_keys
from deployment.cli.room import check_memory
from deployment.config import AppConfig, config_errors
from orca_core.errors import ConfigError, ModelLoadError, OrcaError
from orca_core.host_memory import MemoryReading
from orca_core.source import ModelSource, local_source

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Findings:
    """``problems``: why it cannot work here. ``warnings``: why it may not be what was meant.

    ``longest``: tokens of one request, prompt + output; ``None`` where the model is not on this machine yet.
    """

    problems: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()
    longest: int | None = None

    def raise_problems(self) -> None:
        """Raises ``ConfigError`` with all problems, where there are any."""
        if self.problems:
            raise config_errors(self.problems)


def inspect_here(app: AppConfig, memory: MemoryReading) -> Findings:
    """Look at the files a config names, and at what the model's headers say. Nothing is loaded or downloaded.

    ``memory``: of this machine. A hub id that is not in the local cache is taken for good.
    """
    keys, model = _inspect_keys(app), _inspect_model(app, memory)
    return Findings(keys.problems + model.problems, keys.warnings + model.warnings, model.longest)


def _inspect_keys(app: AppConfig) -> Findings:
    if app.auth.api_keys_file is None:
        return Findings()
    try:
        keys = read_keys(Path(app.auth.api_keys_file).expanduser())
    except ConfigError as error:
        return Findings(error.problems)
    return Findings() if keys else Findings(warnings=(f"{FIELD}: holds no key, so nobody would be let in",))


def _inspect_model(app: AppConfig, memory: MemoryReading) -> Findings:
    try:
        source = local_source(app.model.source, app.model.revision)
        return Findings() if source is None else _inspect_headers(app, source, memory)
    except ModelLoadError as error:
        return Findings((ConfigError("model.source", f"{error.source!r}: {error.reason}"),))
    except ConfigError as error:
        return Findings(error.problems)
    except OrcaError as error:
        return Findings((ConfigError("model.source", str(error)),))


def _inspect_headers(app: AppConfig, source: ModelSource, memory: MemoryReading) -> Findings:
    import torch

    from orca_core.models import read_shape

    on_gpu = app.replicas.num_gpus > 0
    device = torch.device("cuda" if on_gpu else "cpu")
    own_limit, shape = read_shape(source, dtype=app.model.dtype, device=device)
    asked = app.engine.max_model_len
    n_slots = app.engine.n_slots if isinstance(app.engine.n_slots, int) else None
    problems, warnings = [], []
    if asked is not None and asked > own_limit:
        problems.append(ConfigError("engine.max_model_len", f"must be at most {own_limit}, the limit of the model"))
    try:
        check_memory(app, source, memory.total)
    except ConfigError as error:
        problems.append(error)
    needed = app.replicas.max * (n_slots or 0) * shape.bytes_per_slot
    if needed > memory.total and not on_gpu:
        warnings.append(
            f"engine.n_slots: K and V of {app.replicas.max} replicas would take {needed // _MIB} MiB; "
            f"this machine has {memory.total // _MIB} MiB of RAM"
        )
    return Findings(tuple(problems), tuple(warnings), min(asked or own_limit, own_limit, n_slots or own_limit))
