"""The sections of ``AppConfig``: every key with its default, its range, its unit and what it means.

The text below a key becomes its row in docs/configuration.md (``make docs``).
"""

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
    """Which model is served."""

    source: str = Field(default=EMBEDDED_MODEL, min_length=1)
    """Embedded name, local folder with safetensors, ``.gguf`` file, or hub id."""
    id: str = Field(default="", max_length=200)
    """What clients call the model; derived from ``source`` when left out or empty."""
    dtype: Dtype = "auto"
    """Of weights and K/V. ``auto`` = the checkpoint's own, bfloat16 for a GGUF file; float32 on a CPU that has no
    bfloat16 instructions."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null = its main branch."""
    quantization: Quantization = "none"
    """``none`` = weights are held in ``dtype``, whatever the file holds; ``int8``, ``int4`` = as integers with scales,
    on CPUs (docs/cpu.md)."""

    @model_validator(mode="before")
    @classmethod
    def _derive_id(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("id"):
            source = values.get("source", EMBEDDED_MODEL)
            if isinstance(source, str):
                return {**values, "id": _model_id(source)}
        return values


class EngineSection(Section):
    """One replica's engine."""

    device: Device = "auto"
    """``auto`` = a GPU where ``replicas.num_gpus`` is above 0."""
    max_batch_size: int = Field(default=16, ge=1)
    """Requests in one iteration."""
    max_batch_tokens: Literal["auto"] | int = "auto"
    """Tokens (rows) in one iteration, at least ``max_batch_size``: it bounds the pause a long prompt makes in running
    streams. ``auto`` = 128, on a GPU 4096."""
    n_slots: Literal["auto"] | int = "auto"
    """Tokens whose K and V fit, at least ``block_size`` and ``max_model_len``. ``auto`` = from the free memory measured
    after loading."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens of one request, prompt + output; null = the model's own limit, and never above it."""
    block_size: Literal["auto"] | int = "auto"
    """Slots in one block of the paged pool, on a GPU a multiple of 256. ``auto`` = 16, on a GPU 256."""
    cuda_graphs: bool = True
    """On a GPU, replay captured graphs for batches of increments alone."""
    prefix_cache: bool = True
    """Requests that begin with the same tokens share the K/V of that beginning, in whole blocks."""
    overtaking_s: float = Field(default=0.0, ge=0)
    """Seconds for which requests that fit may pass the oldest waiting one while that does not fit; 0 = strictly first
    come, first served."""
    max_overtakers: int = Field(default=16, ge=0)
    """How many requests may pass one."""
    memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Part of the GPU's memory (on CPU: of its share, by CPUs, of the node's RAM) one replica may use; null = 0.9 times
    its share of a GPU, or 0.5 of RAM."""
    max_kv_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of K/V when ``n_slots`` is ``auto``; null = no bound."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads on CPU; null = the whole part of ``replicas.num_cpus``, at least 1."""
    progress_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds with work pending and no finished iteration after which a replica is replaced."""

    @field_validator("n_slots", "max_batch_tokens", "block_size", mode="before")
    @classmethod
    def _auto_or_count(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be auto or an integer of at least 1")


ColdRequests = Literal["wait", "refuse"]


class ReplicasSection(Section):
    """How many replicas there are, and what each has."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas. 0: with nothing to do for ``autoscaling.downscale_delay_s`` there is none."""
    max: int = Field(default=1, ge=1)
    """Most replicas. Above ``min``, their number follows demand."""
    initial: int | None = Field(default=None, ge=1)
    """Replicas at start, from ``min`` to ``max``; null = ``min``, but at least 1: what is served is known only from a
    replica."""
    cold_requests: ColdRequests = "wait"
    """What becomes of a request that comes while there is no replica. Either starts one: ``wait`` = it waits in line,
    within ``limits.max_waiting_*``; ``refuse`` = it is UNAVAILABLE, with a retry delay that follows from the last
    start."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs of one replica, as Ray counts them; a whole number where it is above 1."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPUs of one replica, as Ray counts them."""
    load_report_interval_s: float = Field(default=0.5, gt=0)
    """Seconds between two polls of the replicas by an ingress, and the longest a replica says nothing to one."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds a replica may take to load its model."""

    @property
    def start(self) -> int:
        """Replicas at start."""
        return max(self.min, 1) if self.initial is None else self.initial


class AutoscalingSection(Section):
    """How replicas follow the depth of the queue, when ``replicas.min`` < ``replicas.max``."""

    target_queued_slots_ratio: float = Field(default=0.8, gt=0)
    """Demand aimed for, as a share of what all replicas hold: slots that are reserved, queued or in the ingress's line
    over all slots; or, if that is more, their requests over all batches."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    """Wall-clock seconds for which more replicas must be wanted without a break before there are more."""
    downscale_delay_s: float = Field(default=120.0, ge=0)
    """The same for fewer."""
    interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two decisions, and between two reports of a replica to the autoscaler."""


class LimitsSection(Section):
    """What one client, or all of them together, may ask for."""

    max_waiting_requests: int = Field(default=256, ge=0)
    """Requests in the line of one ingress."""
    max_waiting_slots: int = Field(default=262_144, ge=0)
    """Slots of demand in the line of one ingress."""
    max_slots_per_key: int | None = Field(default=None, ge=1)
    """Slots (prompt + max_new_tokens) that the requests of one API key may hold at an ingress together, waiting or
    reserved; null = no limit. Without keys callers are not told apart, and it counts for nobody."""
    max_prompt_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    """Bytes of a request body or a prompt text; larger ones are refused unparsed."""
    max_request_seconds: float = Field(default=600.0, gt=0)
    """Deadline of a request that names none, and the longest it may name."""
    max_stop_strings: int = Field(default=MAX_STOP_STRINGS, ge=0, le=MAX_STOP_STRINGS)
    """Stop strings of one request."""
    max_logprobs: int = Field(default=_MAX_LOGPROBS, ge=0, le=_MAX_LOGPROBS)
    """Alternatives a request may ask for with each token."""
    max_choices: int = Field(default=64, ge=1)
    """Prompts times ``n`` of one HTTP request."""
    max_stream_backlog: int = Field(default=4096, ge=1)
    """Tokens a reader may lag behind before its request is cancelled."""


class AuthSection(Section):
    """Who may use the service."""

    api_keys_file: str | None = Field(
        default_factory=lambda: os.environ.get(API_KEYS_ENVIRONMENT) or None, min_length=1, validate_default=True
    )
    """Path, on every node with an ingress, of a file with one API key a line (``#``: comment); also from the
    environment variable ``ORCA_API_KEYS_FILE``. null = whoever reaches the service may use it. Changes to the file
    count within a second; replace it by renaming."""


class FailoverSection(Section):
    """What becomes of streams whose replica is lost."""

    max_resumes: int = Field(default=3, ge=0)
    """Times one stream may continue on another replica; 0 = never."""
    silence_s: float = Field(default=5.0, gt=0)
    """Seconds without a sign of life after which a replica counts as lost: longer than anything that may hold up its
    event loop, and at least four times ``replicas.load_report_interval_s``."""


class DrainSection(Section):
    """How the service, or a replica of it, ends."""

    timeout_s: float = Field(default=30.0, ge=0)
    """Seconds open streams may go on after a stop was asked for."""


class IngressSection(Section):
    """The actors that take requests in."""

    replicas: int = Field(default=1, ge=1)
    """Ingress actors. Each has a waiting line of its own."""
    num_cpus: float = Field(default=0.0, ge=0)
    """CPUs of one, as Ray counts them; 0 = share what the replicas leave."""
    coalesce_s: float = Field(default=0.1, ge=0, le=1)
    """Where there is no CPU to be had for a message a token, tokens of one stream that come within so many seconds
    share one, the first token apart; 0 = never."""


def _model_id(source: str) -> str:
    """The name clients use when the config gives none: the last part of a path, the whole of a hub id."""
    if source.endswith(".gguf"):
        return PurePath(source).name.removesuffix(".gguf")
    looks_like_path = source.startswith(("/", ".", "~")) or source.count("/") > 1
    return PurePath(source).name if looks_like_path else source
