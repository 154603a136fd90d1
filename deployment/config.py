"""``AppConfig``: all the deployed service is told, one frozen, validated value; the ``args`` of a Serve config.

Whatever is wrong is a ``ConfigError``: the field's dotted name, and one line that says why or which key is nearest.
Several things that are wrong are one ``ConfigProblemsError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from deployment.config_sections import (
    AuthSection,
    AutoscalingSection,
    DrainSection,
    EngineSection,
    FailoverSection,
    IngressSection,
    LimitsSection,
    ModelSection,
    ReplicasSection,
    Section,
)
from orca_core.config import EngineConfig
from orca_core.errors import ConfigError, ConfigProblemsError

_GPU_MEMORY_UTILIZATION: Final = 0.9

_HEARTBEATS: Final = 4.0
"""How many of its signs of life a replica has to have missed before it counts as lost."""


class AppConfig(Section):
    """The ``args`` of the application. Use ``parse`` for a ``ConfigError`` instead of a ``ValidationError``."""

    model: ModelSection = Field(default_factory=lambda: ModelSection.model_validate({}))
    engine: EngineSection = Field(default_factory=EngineSection)
    replicas: ReplicasSection = Field(default_factory=ReplicasSection)
    autoscaling: AutoscalingSection = Field(default_factory=AutoscalingSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    auth: AuthSection = Field(default_factory=AuthSection)
    failover: FailoverSection = Field(default_factory=FailoverSection)
    drain: DrainSection = Field(default_factory=DrainSection)
    ingress: IngressSection = Field(default_factory=IngressSection)

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None) -> AppConfig:
        """Validate a mapping as read from YAML. Raises ``ConfigError``, with all that is wrong."""
        known, problems = _sort_out(cls, {} if values is None else values, "")
        try:
            config = cls.model_validate(known)
        except ValidationError as error:
            raise config_errors([*problems, *_found_by_pydantic(error)]) from None
        except ConfigError as error:
            raise config_errors([*problems, *error.problems]) from None
        if problems:
            raise config_errors(problems)
        return config

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            known, problems = _sort_out(cls, values, "")
            if problems:
                raise config_errors(problems)
            given = {name: value for name, value in known.items() if value is not None}
            return {"auth": {}, **given}  # validated here, so that an error from its environment has its full name
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [*self._replica_problems(), *self._engine_problems()]
        if problems:
            raise config_errors(problems)
        return self

    def _replica_problems(self) -> Iterator[ConfigError]:
        replicas = self.replicas
        if replicas.min > replicas.max:
            yield ConfigError("replicas.min", f"must not be above replicas.max ({replicas.max})")
        elif not replicas.min <= replicas.start <= replicas.max:
            yield ConfigError("replicas.initial", f"must be from {replicas.min} to {replicas.max} (min to max)")
        if replicas.num_gpus > 1 and replicas.num_gpus != int(replicas.num_gpus):
            yield ConfigError("replicas.num_gpus", "must be a whole number when it is above 1")
        if self.engine.device == "cuda" and replicas.num_gpus == 0:
            yield ConfigError("replicas.num_gpus", "must be above 0 when engine.device is cuda")
        if self.engine.device == "cpu" and replicas.num_gpus > 0:
            yield ConfigError("replicas.num_gpus", "must be 0 when engine.device is cpu")
        if self.failover.silence_s < _HEARTBEATS * replicas.load_report_interval_s:
            least = f"{_HEARTBEATS:g} times replicas.load_report_interval_s ({replicas.load_report_interval_s:g})"
            yield ConfigError("failover.silence_s", f"must be at least {least}")

    def _engine_problems(self) -> Iterator[ConfigError]:
        n_slots, longest = self.engine.n_slots, self.engine.max_model_len
        if isinstance(n_slots, int) and longest is not None and n_slots < longest:
            yield ConfigError("engine.n_slots", f"must be at least engine.max_model_len ({longest}), or lower that")
        try:
            block_size = self._block_size()
        except ConfigError as error:
            yield error
            return
        if isinstance(n_slots, int) and n_slots < block_size:
            yield ConfigError("engine.n_slots", f"must be at least engine.block_size ({block_size})")

    def engine_config(self) -> EngineConfig:
        """What each replica's engine is told. Raises ``ConfigError`` with the dotted name of the field."""
        engine, replicas = self.engine, self.replicas
        try:
            return EngineConfig(
                model=self.model.source,
                revision=self.model.revision,
                dtype=self.model.dtype,
                quantization=self.model.quantization,
                device="cpu" if engine.device == "auto" and replicas.num_gpus == 0 else engine.device,
                max_batch_size=engine.max_batch_size,
                max_batch_tokens=None if engine.max_batch_tokens == "auto" else engine.max_batch_tokens,
                n_slots=None if engine.n_slots == "auto" else engine.n_slots,
                max_model_len=engine.max_model_len,
                block_size=None if engine.block_size == "auto" else engine.block_size,
                cuda_graphs=engine.cuda_graphs,
                prefix_cache=engine.prefix_cache,
                overtaking_s=engine.overtaking_s,
                max_overtakers=engine.max_overtakers,
                memory_utilization=self._memory_utilization(),
                max_kv_bytes=engine.max_kv_bytes,
                threads=max(1, int(replicas.num_cpus)) if engine.threads is None else engine.threads,
                max_stream_backlog=self.limits.max_stream_backlog,
                max_waiting_requests=0,  # requests wait in the ingress: see deployment.line
                max_waiting_slots=0,
                progress_timeout_s=engine.progress_timeout_s,
            )
        except ConfigError as error:
            raise _in_its_section(error) from None

    def _block_size(self) -> int:
        """Slots in a block on the replicas' device. Raises ``ConfigError`` where that cannot do what is asked."""
        config = self.engine_config()
        kind = "cuda" if self.replicas.num_gpus > 0 else "cpu"
        try:
            config.check_device(kind)
            return config.block_size_on(kind)
        except ConfigError as error:
            raise _in_its_section(error) from None

    def _memory_utilization(self) -> float | None:
        """Of a GPU, this replica's part; ``None`` = the engine's default. RAM is divided on the node, by CPUs."""
        if self.engine.memory_utilization is None and self.replicas.num_gpus > 0:
            return _GPU_MEMORY_UTILIZATION * min(1.0, self.replicas.num_gpus)
        return self.engine.memory_utilization


def _in_its_section(error: ConfigError) -> ConfigError:
    """An error of the engine's configuration by the name the field has here."""
    section = "model" if error.field in ("revision", "dtype", "quantization") else "engine"
    return ConfigError(f"{section}.{error.field}", error.reason)


def unknown_key(path: str, key: str, known: list[str]) -> ConfigError:
    """The error for a key nobody knows, with the nearest one that is."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    prefix = path.rpartition(".")[0]
    hint = f"did you mean {prefix + '.' if prefix else ''}{near[0]}?" if near else f"known: {', '.join(known)}"
    return ConfigError(path, f"unknown key; {hint}")


def config_errors(problems: Sequence[ConfigError]) -> ConfigError:
    """One error for at least one problem; the first of each field is kept."""
    kept = list({problem.field: problem for problem in reversed(problems)}.values())[::-1]
    if len(kept) == 1:
        return kept[0]
    return ConfigProblemsError(tuple(each.field for each in kept), tuple(each.reason for each in kept))


def _sort_out(
    model: type[BaseModel], values: Mapping[Any, Any], prefix: str
) -> tuple[dict[str, Any], list[ConfigError]]:
    """What can be validated, and an error for each key, in sections too, that is not a field or holds no mapping."""
    known: dict[str, Any] = {}
    problems: list[ConfigError] = []
    for key, value in values.items():
        field = model.model_fields.get(str(key))
        if field is None:
            problems.append(unknown_key(f"{prefix}{key}", str(key), list(model.model_fields)))
            continue
        known[key] = value
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            continue
        if isinstance(value, Mapping):
            known[key], inner = _sort_out(field.annotation, value, f"{prefix}{key}.")
            problems += inner
        elif value is not None and not isinstance(value, BaseModel):
            problems.append(ConfigError(f"{prefix}{key}", "must be a mapping"))
            del known[key]
    return known, problems


def _found_by_pydantic(error: ValidationError) -> Iterator[ConfigError]:
    """All that pydantic found, each as a dotted name and one line."""
    for each in error.errors(include_url=False, include_context=False):
        names = [part for part in each["loc"] if isinstance(part, int) or part.isidentifier()]
        message = str(each["msg"]).removeprefix("Value error, ").replace("\n", " ")
        reason = message.replace("Input should be", "must be", 1)
        yield ConfigError(".".join(str(part) for part in names) or "args", reason)
