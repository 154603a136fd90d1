"""``RopeConfig`` from a config.json: ``rope_parameters`` (transformers 5), ``rope_theta`` + ``rope_scaling`` before."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from orca_core.models.config import RopeConfig
from orca_core.models.fields import Fields

_OLD_NAMES: Final[Mapping[str, str]] = MappingProxyType({"su": "longrope"})


def rope_section(fields: Fields) -> Fields:
    """Where the rope parameters are."""
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    section: Fields | None = None,
    theta: float = 10000.0,
    old_names: Mapping[str, str] = _OLD_NAMES,
    may_be_partial: bool = False,
    original: int | None = None,
) -> RopeConfig:
    """One rope. ``section``: where it is, if not in its usual place; then nothing beside it counts but the limit.

    ``theta``: where the file has none. ``old_names`` of variants. ``may_be_partial``: the architecture knows heads of
    which only a part is rotated. ``original``: the original limit where the file has none; ``None`` = the limit.
    Raises ``ModelLoadError``.
    """
    rope, top = (rope_section(fields), fields) if section is None else (section, section)
    variant = rope.text("rope_type", default=rope.text("type", default="default"))
    variant = old_names.get(variant, variant)
    limit = fields.integer("max_position_embeddings")
    # a value beside rope_scaling wins over one in it, and the model's limit stands in for both, as in transformers
    original = rope.integer("original_max_position_embeddings", default=original or limit)
    original = top.integer("original_max_position_embeddings", default=original)
    fallback = limit / original if variant in ("yarn", "longrope") and original > 0 else None
    scaled = variant in ("linear", "llama3", "yarn", "longrope")
    return RopeConfig(
        variant=variant,
        theta=rope.number("rope_theta", default=top.number("rope_theta", default=theta)),
        factor=rope.number("factor", default=fallback) if scaled else 1.0,
        dim=_dim(fields, rope, head_dim, may_be_partial),
        low_freq_factor=rope.number("low_freq_factor") if variant == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if variant == "llama3" else 4.0,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        divisors=rope.numbers("short_factor") if variant == "longrope" else (),
        long_divisors=rope.numbers("long_factor") if variant == "longrope" else (),
    )


def _dim(fields: Fields, rope: Fields, head_dim: int, may_be_partial: bool) -> int | None:
    share = rope.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    if share == 1.0:
        return None
    if not may_be_partial:
        raise fields.error("partial_rotary_factor", f"{share} is not supported; only whole heads are rotated")
    if abs(share) > 1e6:  # times a size it may be infinite; what is merely too large is refused by the rope itself
        raise fields.error("partial_rotary_factor", "must be above 0 and at most 1")
    return int(head_dim * share)
