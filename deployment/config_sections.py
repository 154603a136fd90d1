"""The sections of ``AppConfig``: every key with its default, its unit and what it means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from orca_core.config import EMBEDDED_MODEL, Device, Dtype, Quantization
from orca_core.params import MAX_STOP_STRINGS, SAMPLING_RANGES

API_KEYS_ENVIRONMENT: Final = "ORCA_API_KEYS_FILE"
_MAX_LOGPROBS: Final = int(SAMPLING_RANGES["logprobs"].high)


class Section(BaseModel):
    """Frozen, strict about names, types ("16" is no integer) and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """``id``: what clients call the model; derived from ``source`` when left out.

    ``source``: embedded name, local folder with safetensors, ``.gguf`` file, or hub id; ``revision``: of a hub id.
    ``dtype``: of weights and K/V. ``quantization``: ``none`` = weights are held in ``dtype``, whatever the file holds;
    ``int8``, ``int4`` = as integers with scales, on CPUs: see docs/cpu.md.
    """

    source: str = Field(default=EMBEDDED_MODEL, min_length=1)
    id: str = Field(default="", max_length=200)
    dtype: Dtype = "auto"
    revision: str | None = None
    quantization: Quantization = "none"

    @model_validator(mode="before")
    @classmethod
    def _derive_id(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("id"):
            source = values.get("source", EMBEDDED_MODEL)
            if isinstance(source, str):
                return {**values, "id": _model_id(source)}
        return values


class EngineSection(Section):
    """One replica's engine.

    - ``max_batch_size``: requests in one iteration; ``max_batch_tokens``: tokens (rows) in one iteration,
      which bounds the pause a long prompt makes in running streams; ``auto`` = 128, on a GPU 4096.
    - ``n_slots``: tokens whose K and V fit; ``auto`` = from the free memory measured after loading.
    - ``max_model_len``: tokens of one request, prompt + output; null = the model's own limit.
    - ``block_size``: slots in one block of the paged pool, on a GPU a multiple of 256; ``auto`` = 16, on a GPU 256.
    - ``cuda_graphs``: on a GPU, replay captured graphs for batches of increments alone.
    - ``prefix_cache``: requests that begin with the same tokens share the K/V of that beginning, in whole blocks.
    - ``overtaking_s``: seconds for which requests that fit may pass the oldest waiting one while that does not fit;
      0 = strictly first come, first served. ``max_overtakers``: how many may pass one request.
    - ``memory_utilization``: part, 0 to 1, of the GPU's memory (on CPU: of its share of the node's RAM) one replica
      may use; null = 0.9 times its share of a GPU, or 0.5. The share of RAM is that of the node's CPUs.
    - ``max_kv_bytes``: most bytes of K/V when ``n_slots`` is ``auto``; null = no bound.
    - ``threads``: torch threads on CPU; null = the whole part of ``replicas.num_cpus``, at least 1.
    - ``progress_timeout_s``: seconds with work pending and no finished iteration after which a replica is replaced.
    """

    device: Device = "auto"
    max_batch_size: int = Field(default=16, ge=1)
    max_batch_tokens: Literal["auto"] | int = "auto"
    n_slots: Literal["auto"] | int = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    block_size: Literal["auto"] | int = "auto"
    cuda_graphs: bool = True
    prefix_cache: bool = True
    overtaking_s: float = Field(default=0.0, ge=0)
    max_overtakers: int = Field(default=16, ge=0)
    memory_utilization: float | None = Field(default=None, gt=0, le=1)
    max_kv_bytes: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    progress_timeout_s: float = Field(default=60.0, gt=0)

    @field_validator("n_slots", "max_batch_tokens", "block_size", mode="before")
    @classmethod
    def _auto_or_count(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be auto or an integer of at least 1")


class ReplicasSection(Section):
    """``min`` <= ``initial`` <= ``max`` replicas; ``initial`` null = ``min``.

    ``num_gpus``, ``num_cpus``: of one replica, as Ray counts them. ``load_report_interval_s``: seconds between two
    polls of the replicas by an ingress, and the longest a replica says nothing to one. ``startup_timeout_s``: seconds a
    replica may take to load its model.
    """

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    initial: int | None = Field(default=None, ge=1)
    num_gpus: float = Field(default=0.0, ge=0)
    num_cpus: float = Field(default=1.0, gt=0)
    load_report_interval_s: float = Field(default=0.5, gt=0)
    startup_timeout_s: float = Field(default=600.0, gt=0)

    @property
    def start(self) -> int:
        """Replicas at start."""
        return self.min if self.initial is None else self.initial


class AutoscalingSection(Section):
    """How replicas follow the depth of the queue, when ``replicas.min`` < ``replicas.max``.

    - ``target_queued_slots_ratio``: demand aimed for, as a share of what all replicas hold: slots that are reserved,
      queued or in the ingress's line over all slots; or, if that is more, their requests over all batches.
    - ``upscale_delay_s`` / ``downscale_delay_s``: wall-clock seconds for which more, or fewer, replicas must be wanted
      without a break before their number changes.
    - ``interval_s``: seconds between two decisions, and between two reports of a replica to the autoscaler.
    """

    target_queued_slots_ratio: float = Field(default=0.8, gt=0)
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)
    interval_s: float = Field(default=1.0, gt=0)


class LimitsSection(Section):
    """What one client, or all of them together, may ask for.

    - ``max_waiting_requests`` / ``max_waiting_slots``: the line of one ingress, in requests and in slots of demand.
    - ``max_prompt_bytes``: of a request body or a prompt text, bytes; larger ones are refused unparsed.
    - ``max_request_seconds``: deadline of a request that names none, and the longest it may name.
    - ``max_stop_strings`` / ``max_logprobs``: per request. ``max_choices``: prompts times ``n`` of one HTTP request.
    - ``max_stream_backlog``: tokens a reader may lag behind before its request is cancelled.
    """

    max_waiting_requests: int = Field(default=256, ge=0)
    max_waiting_slots: int = Field(default=262_144, ge=0)
    max_prompt_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    max_request_seconds: float = Field(default=600.0, gt=0)
    max_stop_strings: int = Field(default=MAX_STOP_STRINGS, ge=0, le=MAX_STOP_STRINGS)
    max_logprobs: int = Field(default=_MAX_LOGPROBS, ge=0, le=_MAX_LOGPROBS)
    max_choices: int = Field(default=64, ge=1)
    max_stream_backlog: int = Field(default=4096, ge=1)


class AuthSection(Section):
    """``api_keys_file``: path, on every node with an ingress, of a file with one API key a line (``#``: comment); also
    from the environment variable ``ORCA_API_KEYS_FILE``. null = whoever reaches the service may use it. Changes to the
    file count within a second; replace it by renaming.
    """

    api_keys_file: str | None = Field(
        default_factory=lambda: os.environ.get(API_KEYS_ENVIRONMENT) or None, min_length=1, validate_default=True
    )


class FailoverSection(Section):
    """``max_resumes``: times one stream may continue on another replica after its replica was lost.

    ``silence_s``: seconds without a sign of life after which a replica counts as lost; it has to be longer than
    anything that may hold up the replica's event loop, and than a few times ``replicas.load_report_interval_s``.
    """

    max_resumes: int = Field(default=3, ge=0)
    silence_s: float = Field(default=5.0, gt=0)


class DrainSection(Section):
    """``timeout_s``: seconds open streams may go on after a stop was asked for."""

    timeout_s: float = Field(default=30.0, ge=0)


class IngressSection(Section):
    """``replicas``: ingress actors. ``num_cpus``: of one, as Ray counts them; 0 = share what the replicas leave."""

    replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.0, ge=0)


def _model_id(source: str) -> str:
    """The name clients use when the config gives none: the last part of a path, the whole of a hub id."""
    if source.endswith(".gguf"):
        return PurePath(source).name.removesuffix(".gguf")
    looks_like_path = source.startswith(("/", ".", "~")) or source.count("/") > 1
    return PurePath(source).name if looks_like_path else source
