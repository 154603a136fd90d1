"""Attention over the paged pool: a protocol, and one file per backend."""

from orca_core.attention.base import AttentionBackend

__all__ = ["AttentionBackend"]
