"""Attention over the paged pool: a protocol, and one file per backend."""

from orca_core.attention.base import AttentionBackend, AttentionSpec

__all__ = ["AttentionBackend", "AttentionSpec"]
