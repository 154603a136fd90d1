"""``AppConfig``: all the deployed service is told, one frozen, validated value; the ``args`` of a Serve config.

Whatever is wrong is a ``ConfigError``: the field's dotted name, and one line that says why or which key is nearest.
Several things that are wrong are one ``ConfigProblemsError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from deployment.config_problems import any_of, config_errors, found_by_pydantic, sort_out, without
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
from orca_core.errors import ConfigError

_GPU_MEMORY_UTILIZATION: Final = 0.9

_HEARTBEATS: Final = 4.0
"""How many of its signs of life a replica has to have missed before it counts as lost."""

_WRONG: Final = "wrong"
_DEVICE: Final = ("engine.device", "replicas.num_gpus")
_SEEN_WITH: Final[Mapping[str, tuple[str, ...]]] = {
    "engine.max_batch_tokens": ("engine.max_batch_size",),
    "engine.block_size": _DEVICE,
    "model.quantization": _DEVICE,
}
"""Fields the engine judges -> the others it looks at for that."""

_Misfit = tuple[ConfigError, tuple[str, ...]]
"""What does not fit, and the other fields it does not fit to."""


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
        """Validate a mapping as read from YAML. Raises ``ConfigError``, with all that is wrong.

        What does not fit together is said beside what is wrong by itself, where the fields in question are right.
        """
        known, problems, wrong = sort_out(cls, {} if values is None else values, "")
        try:
            config = cls.model_validate(known, context={_WRONG: frozenset(wrong)})
        except ValidationError as error:
            found = list(found_by_pydantic(error))
            wrong |= {each.field for each in found}
            raise config_errors([*problems, *found, *cls._misfits_beside(known, wrong)]) from None
        except ConfigError as error:
            raise config_errors([*problems, *error.problems]) from None
        if problems:
            raise config_errors(problems)
        return config

    @classmethod
    def _misfits_beside(cls, known: Mapping[str, Any], wrong: set[str]) -> tuple[ConfigError, ...]:
        """What does not fit together, of all that is right by itself."""
        try:
            cls.model_validate(without(known, wrong), context={_WRONG: frozenset(wrong)})
        except ConfigError as error:
            return error.problems
        except ValidationError:  # what follows from one field is wrong in another: an id from an endless source
            return ()
        return ()

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            known, problems, _ = sort_out(cls, values, "")
            if problems:
                raise config_errors(problems)
            given = {name: value for name, value in known.items() if value is not None}
            return {"auth": {}, **given}  # validated here, so that an error from its environment has its full name
        return values

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        wrong: frozenset[str] = (info.context or {}).get(_WRONG, frozenset())
        misfits = [*self._replica_misfits(), *self._engine_misfits()]
        problems = [problem for problem, others in misfits if not any_of((problem.field, *others), wrong)]
        if problems:
            raise config_errors(problems)
        return self

    def _replica_misfits(self) -> Iterator[_Misfit]:
        replicas, device = self.replicas, self.engine.device
        if replicas.min > replicas.max:
            yield _misfit("replicas.min", f"must not be above replicas.max ({replicas.max})", "replicas.max")
        elif not replicas.min <= replicas.start <= replicas.max:
            reason = f"must be from {replicas.min} to {replicas.max} (min to max)"
            yield _misfit("replicas.initial", reason, "replicas.min", "replicas.max")
        if replicas.num_gpus > 1 and replicas.num_gpus != int(replicas.num_gpus):
            yield _misfit("replicas.num_gpus", "must be a whole number when it is above 1")
        if device == "cuda" and replicas.num_gpus == 0:
            yield _misfit("replicas.num_gpus", "must be above 0 when engine.device is cuda", "engine.device")
        if device == "cpu" and replicas.num_gpus > 0:
            yield _misfit("replicas.num_gpus", "must be 0 when engine.device is cpu", "engine.device")
        if self.failover.silence_s < _HEARTBEATS * replicas.load_report_interval_s:
            least = f"{_HEARTBEATS:g} times replicas.load_report_interval_s ({replicas.load_report_interval_s:g})"
            yield _misfit("failover.silence_s", f"must be at least {least}", "replicas.load_report_interval_s")

    def _engine_misfits(self) -> Iterator[_Misfit]:
        n_slots, longest = self.engine.n_slots, self.engine.max_model_len
        if isinstance(n_slots, int) and longest is not None and n_slots < longest:
            reason = f"must be at least engine.max_model_len ({longest}), or lower that"
            yield _misfit("engine.n_slots", reason, "engine.max_model_len")
        kind = "cuda" if self.replicas.num_gpus > 0 else "cpu"
        arguments = self._engine_arguments()
        config: EngineConfig | None = None
        while config is None:
            try:
                tried = EngineConfig(**arguments)
                tried.check_device(kind)
                config = tried
            except ConfigError as error:
                named = _in_its_section(error)
                yield _misfit(named.field, named.reason, *_SEEN_WITH.get(named.field, ()))
                if error.field not in arguments:
                    return
                del arguments[error.field]  # with its default: is there more?
        if isinstance(n_slots, int) and n_slots < config.block_size_on(kind):
            reason = f"must be at least engine.block_size ({config.block_size_on(kind)})"
            yield _misfit("engine.n_slots", reason, "engine.block_size", *_SEEN_WITH["engine.block_size"])

    def engine_config(self) -> EngineConfig:
        """What each replica's engine is told. Raises ``ConfigError`` with the dotted name of the field."""
        try:
            return EngineConfig(**self._engine_arguments())
        except ConfigError as error:
            raise _in_its_section(error) from None

    def _engine_arguments(self) -> dict[str, Any]:
        engine, replicas = self.engine, self.replicas
        return {
            "model": self.model.source,
            "revision": self.model.revision,
            "dtype": self.model.dtype,
            "quantization": self.model.quantization,
            "device": "cpu" if engine.device == "auto" and replicas.num_gpus == 0 else engine.device,
            "max_batch_size": engine.max_batch_size,
            "max_batch_tokens": None if engine.max_batch_tokens == "auto" else engine.max_batch_tokens,
            "n_slots": None if engine.n_slots == "auto" else engine.n_slots,
            "max_model_len": engine.max_model_len,
            "block_size": None if engine.block_size == "auto" else engine.block_size,
            "cuda_graphs": engine.cuda_graphs,
            "prefix_cache": engine.prefix_cache,
            "overtaking_s": engine.overtaking_s,
            "max_overtakers": engine.max_overtakers,
            "memory_utilization": self._memory_utilization(),
            "max_kv_bytes": engine.max_kv_bytes,
            "threads": max(1, int(replicas.num_cpus)) if engine.threads is None else engine.threads,
            "max_stream_backlog": self.limits.max_stream_backlog,
            "max_waiting_requests": 0,  # requests wait in the ingress: see deployment.line
            "max_waiting_slots": 0,
            "progress_timeout_s": engine.progress_timeout_s,
        }

    def _memory_utilization(self) -> float | None:
        """Of a GPU, this replica's part; ``None`` = the engine's default. RAM is divided on the node, by CPUs."""
        if self.engine.memory_utilization is None and self.replicas.num_gpus > 0:
            return _GPU_MEMORY_UTILIZATION * min(1.0, self.replicas.num_gpus)
        return self.engine.memory_utilization


def _misfit(field: str, reason: str, *others: str) -> _Misfit:
    return ConfigError(field, reason), others


def _in_its_section(error: ConfigError) -> ConfigError:
    """An error of the engine's configuration by the name the field has here."""
    section = "model" if error.field in ("revision", "dtype", "quantization") else "engine"
    return ConfigError(f"{section}.{error.field}", error.reason)
