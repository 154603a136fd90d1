"""What a decoder is built from: one configuration, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from orca_core.errors import ModelLoadError

MAX_INT32: Final = 2**31 - 1
"""What a size may be: kernels hold them in 32 bits. Beyond it a window would be another one."""

_LEAST: Final = 1e-30
"""Scales and caps: a float32 that is 0 or infinite would mean something else."""

ROPE_VARIANTS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "divided")

NormKind = Literal["rms", "rms_wide", "layer"]
"""``rms``: root-mean-square norm, rounded to the model's dtype before the weight. ``rms_wide``: rounded after it.
``layer``: mean and variance, with a bias."""

QkNorm = Literal["head", "width"]
"""Norm of q and k before rope: over each head, or over all heads of the projection together."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Names as in ``rope_parameters`` of a config.json, which says what each one does.

    ``variant``: one of ``ROPE_VARIANTS``. ``dynamic`` differs from ``default`` only beyond the model's own limit, which
    requests never cross here. ``divided``: frequency i is divided by ``divisors[i]`` (``rope_freqs`` of a GGUF file).
    ``longrope``: so too, and by ``long_divisors[i]`` where the model serves more than
    ``original_max_position_embeddings``. ``dim``: elements of a head that are rotated, the first ones; ``None`` = all.
    ``attention_factor``: ``None`` = derived from ``factor`` (yarn, longrope).
    """

    variant: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    dim: int | None = None
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
    long_divisors: tuple[float, ...] = ()

    @property
    def betas(self) -> tuple[float, float]:
        """Rotations over the original length from which on a dimension is fast, and up to which it is slow (yarn)."""
        return self.beta_fast, self.beta_slow

    def check(self, source: str, head_dim: int) -> None:
        """Refuse what no table can be built from. Raises ``ModelLoadError``; ``source`` is for its message."""
        dim = head_dim if self.dim is None else self.dim
        if self.variant not in ROPE_VARIANTS:
            known = ", ".join(ROPE_VARIANTS)
            raise ModelLoadError(source, f"rope variant {self.variant!r} is not supported; known: {known}")
        if dim % 2 or not 0 < dim <= head_dim:
            raise ModelLoadError(source, f"configuration: rope cannot rotate {dim} elements of a head of {head_dim}")
        if not self.theta > 0 or not self.factor > 0:
            raise ModelLoadError(source, "configuration: rope theta and factor must be above 0")
        if self.variant in ("llama3", "yarn", "longrope") and self.original_max_position_embeddings < 2:
            raise ModelLoadError(source, "configuration: rope needs original_max_position_embeddings")
        if self.variant == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(source, "configuration: rope needs 0 < low_freq_factor < high_freq_factor")
        if self.variant == "yarn" and not (self.theta > 1 and all(1e-6 <= b <= 1e6 for b in self.betas)):
            raise ModelLoadError(source, "configuration: yarn rope needs theta above 1 and betas in [1e-6, 1e6]")
        lists = {"divided": (self.divisors,), "longrope": (self.divisors, self.long_divisors)}.get(self.variant, ())
        if any(len(divisors) != dim // 2 or not all(divisors) for divisors in lists):
            raise ModelLoadError(source, f"configuration: rope needs {dim // 2} divisors, none of them 0")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer. ``rope``: ``None`` = q and k are not rotated. ``window``: positions a row
    sees, its own included; ``None`` = all before it.
    """

    rope: RopeConfig | None = RopeConfig()
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder code is driven by. ``architecture``: the transformers class name.

    Sizes are in elements. ``layers``: one entry a layer. ``gated_mlp``: activation(gate) * up, else activation(up).
    ``activation``: a name of ``layers.ACTIVATIONS``. ``learned_positions``: a trained row a position is added to the
    embedding. ``embedding_scale``: on the embedding. ``attention_scale``: on the products of q and k; ``None`` =
    1 / sqrt(head_dim). ``attention_softcap``, ``logit_softcap``: x becomes cap * tanh(x / cap). ``tied_head``: the
    output projection is the embedding. ``qkv_bias``, ``output_bias`` (of attention) and ``mlp_bias``: which projections
    have one. ``eos_ids``: every id that ends a generation. ``dtype``: the checkpoint's own, as a torch name; ``None`` =
    it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm: NormKind = "rms"
    qk_norm: QkNorm | None = None
    activation: str = "silu"
    gated_mlp: bool = True
    learned_positions: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def check(self, source: str) -> None:
        """Refuse what no decoder can be built from. Raises ``ModelLoadError``; ``source`` is for its message."""
        for name in (
            "vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "intermediate_size",
            "max_position_embeddings",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= MAX_INT32:
                raise ModelLoadError(source, f"configuration: {name} must be at least 1 and at most {MAX_INT32}")
        if self.n_heads % self.n_kv_heads:
            raise ModelLoadError(
                source, f"configuration: {self.n_heads} heads cannot share {self.n_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(source, f"configuration: head_dim {self.head_dim} must be even")
        if not _LEAST <= self.norm_eps < 1:
            raise ModelLoadError(source, f"configuration: epsilon {self.norm_eps} of the norms must be between 0 and 1")
        for name in ("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ModelLoadError(source, f"configuration: {name} must be above 0")
            if value is not None and not _LEAST <= value <= 1 / _LEAST:
                raise ModelLoadError(source, f"configuration: {name} {value:g} is out of float32's range")
        self._check_layers(source)

    def _check_layers(self, source: str) -> None:
        for layer in dict.fromkeys(self.layers):
            if layer.window is not None and not 1 <= layer.window <= MAX_INT32:
                raise ModelLoadError(source, "configuration: a window must have at least 1 position")
            if layer.rope is not None:
                layer.rope.check(source, self.head_dim)
