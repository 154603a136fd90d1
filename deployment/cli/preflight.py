"""What a config needs of this machine, looked at before anything is started: files, the model's limits, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployment.auth import FIELD, read_keys
from deployment.cli.machine import Machine
from deployment.cli.room import MIB, available, check_gpus, check_memory, least_bytes, needed, replicas_on
from deployment.config import AppConfig
from deployment.config_problems import config_errors
from orca_core.errors import ConfigError, ModelLoadError, OrcaError
from orca_core.host_memory import MemoryReading
from orca_core.source import ModelSource, local_source


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


def inspect_here(app: AppConfig, machine: Machine, starting: bool = False) -> Findings:
    """Look at the files a config names, at what the model's headers say, and at the machine. Nothing is loaded.

    ``starting``: it will be started now, and here, so that what is short is a problem, and not a warning. A hub id that
    is not in the local cache is taken for good.
    """
    parts = (
        _inspect_keys(app),
        _inspect_model(app, machine.memory, starting),
        _inspect_devices(app, machine, starting),
    )
    return Findings(
        sum((part.problems for part in parts), ()),
        sum((part.warnings for part in parts), ()),
        parts[1].longest,
    )


def _inspect_keys(app: AppConfig) -> Findings:
    if app.auth.api_keys_file is None:
        return Findings()
    try:
        keys = read_keys(Path(app.auth.api_keys_file).expanduser())
    except ConfigError as error:
        return Findings(error.problems)
    return Findings() if keys else Findings(warnings=(f"{FIELD}: holds no key, so nobody would be let in",))


def _inspect_model(app: AppConfig, memory: MemoryReading, starting: bool) -> Findings:
    try:
        source = local_source(app.model.source, app.model.revision)
        return Findings() if source is None else _inspect_headers(app, source, memory, starting)
    except ModelLoadError as error:
        return Findings((ConfigError("model.source", f"{error.source!r}: {error.reason}"),))
    except ConfigError as error:
        return Findings(error.problems)
    except OrcaError as error:
        return Findings((ConfigError("model.source", str(error)),))


def _inspect_headers(app: AppConfig, source: ModelSource, memory: MemoryReading, starting: bool) -> Findings:
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
        check_memory(app, source, memory)
    except ConfigError as error:
        if starting or app.replicas.max * least_bytes(app, source) > memory.total:
            problems.append(error)
        else:  # what holds it may end before it is started: perhaps the very service whose config this is
            warnings.append(str(error))
    needed_bytes = app.replicas.max * (n_slots or 0) * shape.bytes_per_slot
    if needed_bytes > memory.available and not on_gpu:
        warnings.append(
            f"engine.n_slots: K and V of {app.replicas.max} replicas would take {needed_bytes // MIB} MiB; "
            f"{available(memory)}"
        )
    return Findings(tuple(problems), tuple(warnings), min(asked or own_limit, own_limit, n_slots or own_limit))


def _inspect_devices(app: AppConfig, machine: Machine, starting: bool) -> Findings:
    replicas, n_ingresses = app.replicas, app.ingress.replicas
    problems, warnings = [], []
    fit = replicas_on(machine.n_gpus, app)
    if starting and fit < replicas.start:
        try:
            check_gpus(app, machine.n_gpus)
        except ConfigError as error:
            problems.append(error)
    elif fit < replicas.max:
        there = f"this machine has {machine.n_gpus} that torch can use"
        come = f"no more than {fit} would start here" if fit >= replicas.start else "it would not start here"
        warnings.append(f"replicas.num_gpus: {needed(replicas.max, replicas.num_gpus, 'GPU')}; {there}: {come}")
    n_cpus = replicas.max * replicas.num_cpus + n_ingresses * app.ingress.num_cpus
    if n_cpus > machine.n_cpus:
        ingresses = "" if app.ingress.num_cpus == 0 else f" and {n_ingresses * app.ingress.num_cpus:g} for ingresses"
        warnings.append(
            f"replicas.num_cpus: {needed(replicas.max, replicas.num_cpus, 'CPU')}{ingresses}; this machine has "
            f"{machine.n_cpus:g}: `up` lets them share these, on a cluster replicas would wait for more"
        )
    return Findings(tuple(problems), tuple(warnings))
