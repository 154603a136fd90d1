"""Rotary position embedding: the frequencies of each variant, and the rotation.

Sources: RoFormer (Su et al., 2021), YaRN (Peng et al., 2023), LongRoPE (Ding et al., 2024), the Llama 3.1 reference.
Numbers follow transformers.
"""

from __future__ import annotations

import math

import torch

from orca_core.models.config import ModelConfig, RopeConfig


def rope_frequencies(config: ModelConfig, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 ``[rotated elements / 2]``, radians per position; and the factor on cosine and sine.

    ``longrope`` has two sets. Which one is used follows from the length the model serves, not from a request's: K must
    not depend on who asks (vLLM does it so too; transformers goes by the sequence, and recomputes when it crosses).
    """
    dim = rope.dim or config.head_dim
    inverse = 1.0 / _powers(rope, dim)
    match rope.variant:
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inverse), 1.0
        case "yarn":
            return _yarn(rope, dim), _yarn_attention_factor(rope)
        case "divided":
            return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * _powers(rope, dim)), 1.0
        case "longrope":
            is_long = config.max_position_embeddings > rope.original_max_position_embeddings
            divisors = torch.tensor(rope.long_divisors if is_long else rope.divisors, dtype=torch.float32)
            return 1.0 / (divisors * _powers(rope, dim)), _longrope_attention_factor(rope)
    return inverse, 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` ``[n_tokens, heads, head_dim]``; ``cos`` and ``signed_sin`` are ``[n_tokens, 1, rotated elements]``.

    The sign of the half-rotation lives in ``signed_sin``, which is built once an iteration, not once a layer. What of a
    head lies behind the rotated elements passes as it is.
    """
    dim = cos.shape[-1]
    if dim != x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, signed_sin), x[..., dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * signed_sin


class RotaryTable:
    """Cosines and sines of the positions of one iteration."""

    def __init__(self, config: ModelConfig, rope: RopeConfig, device: torch.device) -> None:
        frequencies, self._scaling = rope_frequencies(config, rope)
        self._frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``signed_sin`` for ``rotate``, from int64 ``positions`` ``[n_tokens]``. Angles are float32."""
        cos, sin = (table[:, None] for table in self.angles(positions))
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 ``[n_tokens, rotated elements / 2]``, of int64 ``positions`` ``[n_tokens]``."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return angles.cos() * self._scaling, angles.sin() * self._scaling


def _powers(rope: RopeConfig, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    powers: torch.Tensor = rope.theta**exponents
    return powers


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones kept, and those between blended."""
    waves = 2 * math.pi / inverse
    original = rope.original_max_position_embeddings
    blend = (original / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(waves > original / rope.low_freq_factor, inverse / rope.factor, blended)
    return torch.where(waves < original / rope.high_freq_factor, inverse, stretched)


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """A ramp over the dimensions from extrapolation (fast ones, unchanged) to interpolation (slow ones, / factor)."""
    powers = _powers(rope, dim)

    def dimension_of(n_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (n_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = map(dimension_of, rope.betas)
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


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
