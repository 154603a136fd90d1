"""Rotary position embedding: the frequencies of each variant, and the rotation.

Sources: RoFormer (Su et al., 2021), YaRN (Peng et al., 2023), the Llama 3.1 reference. Numbers follow transformers.
"""

from __future__ import annotations

import math

import torch

from orca_core.models.config import ModelConfig, RopeConfig


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 ``[head_dim / 2]``, radians per position; and the factor on cosine and sine."""
    rope = config.rope
    inverse = 1.0 / _powers(config)
    if rope.variant == "linear":
        return inverse / rope.factor, 1.0
    if rope.variant == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.variant == "yarn":
        return _yarn(config), _yarn_attention_factor(rope)
    if rope.variant == "divided":
        return inverse / torch.tensor(rope.divisors, dtype=torch.float32), 1.0
    return inverse, 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` ``[n_tokens, heads, head_dim]``; ``cos`` and ``signed_sin`` are ``[n_tokens, 1, head_dim]``.

    The sign of the half-rotation lives in ``signed_sin``, which is built once an iteration, not once a layer.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * signed_sin


class RotaryTable:
    """Cosines and sines of the positions of one iteration."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._scaling = rope_frequencies(config)
        self._frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``signed_sin`` for ``rotate``, from int64 ``positions`` ``[n_tokens]``. Angles are float32."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _powers(config: ModelConfig) -> torch.Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    powers: torch.Tensor = config.rope.theta**exponents
    return powers


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones kept, and those between blended."""
    waves = 2 * math.pi / inverse
    original = rope.original_max_position_embeddings
    blend = (original / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(waves > original / rope.low_freq_factor, inverse / rope.factor, blended)
    return torch.where(waves < original / rope.high_freq_factor, inverse, stretched)


def _yarn(config: ModelConfig) -> torch.Tensor:
    """A ramp over the dimensions from extrapolation (fast ones, unchanged) to interpolation (slow ones, / factor)."""
    rope, dim = config.rope, config.head_dim
    powers = _powers(config)

    def dimension_of(n_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (n_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return ramp / (rope.factor * powers) + (1 - ramp) / powers


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
