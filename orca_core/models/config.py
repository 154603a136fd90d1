"""What a decoder is built from: one configuration, whatever file it was read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from orca_core.errors import ModelLoadError

ROPE_VARIANTS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "divided")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Names as in ``rope_parameters`` of a config.json, which says what each one does.

    ``variant``: one of ``ROPE_VARIANTS``. ``dynamic`` differs from ``default`` only beyond the model's own limit, which
    requests never cross here. ``divided``: frequency i is divided by ``divisors[i]`` (``rope_freqs`` of a GGUF file).
    ``attention_factor``: ``None`` = derived from ``factor`` (yarn).
    """

    variant: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder code is driven by. ``architecture``: the transformers class name.

    Sizes are in elements. ``tied_head``: the output projection is the embedding. ``qkv_bias``, ``output_bias`` (of
    attention) and ``mlp_bias``: which projections have one. ``eos_ids``: every id that ends a generation.
    ``dtype``: the checkpoint's own, as a torch name; ``None`` = it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_head: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def check(self, source: str) -> None:
        """Refuse what no decoder can be built from. Raises ``ModelLoadError``; ``source`` is for its message."""
        for name in (
            "vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "intermediate_size",
            "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelLoadError(source, f"configuration: {name} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ModelLoadError(
                source, f"configuration: {self.n_heads} heads cannot share {self.n_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(source, f"configuration: head_dim {self.head_dim} must be even")
        if not 0 < self.rms_norm_eps < 1:
            raise ModelLoadError(source, f"configuration: rms_norm_eps {self.rms_norm_eps} must be between 0 and 1")
        self._check_rope(source)

    def _check_rope(self, source: str) -> None:
        rope = self.rope
        if rope.variant not in ROPE_VARIANTS:
            known = ", ".join(ROPE_VARIANTS)
            raise ModelLoadError(source, f"rope variant {rope.variant!r} is not supported; known: {known}")
        if not rope.theta > 0 or not rope.factor > 0:
            raise ModelLoadError(source, "configuration: rope theta and factor must be above 0")
        if rope.variant in ("llama3", "yarn") and rope.original_max_position_embeddings < 1:
            raise ModelLoadError(source, "configuration: rope needs original_max_position_embeddings")
        if rope.variant == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
            raise ModelLoadError(source, "configuration: rope needs 0 < low_freq_factor < high_freq_factor")
        if rope.variant == "yarn" and not (rope.theta > 1 and rope.beta_fast > 0 and rope.beta_slow > 0):
            raise ModelLoadError(source, "configuration: yarn rope needs theta above 1 and positive betas")
        if rope.variant == "divided" and (len(rope.divisors) != self.head_dim // 2 or not all(rope.divisors)):
            raise ModelLoadError(source, f"configuration: rope needs {self.head_dim // 2} divisors, none of them 0")


class Fields:
    """Typed reading of an untyped mapping from a file: a wrong or missing value is a ``ModelLoadError`` naming it."""

    def __init__(self, source: str, values: Mapping[str, object], prefix: str = "") -> None:
        self._source = source
        self._values = values
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(self._prefix + name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; required where there is no default."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required where there is no default."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "must be a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number, or ``None`` where there is none."""
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required where there is no default."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def section(self, name: str) -> Fields:
        """A mapping inside this one; empty where there is none."""
        value = self._values.get(self._prefix + name)
        if value is None:
            return Fields(self._source, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(self._source, value)

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: one integer, a list of them, or nothing at all."""
        value = self._values.get(self._prefix + name)
        values: Iterable[object] = value if isinstance(value, list) else () if value is None else (value,)
        ids: list[int] = []
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.error(name, "must be a token id or a list of them")
            ids.append(item)
        return tuple(ids)

    def error(self, name: str, reason: str) -> ModelLoadError:
        """The error for one field."""
        return ModelLoadError(self._source, f"configuration: {self._prefix}{name} {reason}")

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
