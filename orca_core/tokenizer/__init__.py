"""Text to token ids and back, and chat templates: transformers' tokenizers behind a small, thread-safe face."""

from __future__ import annotations

from orca_core.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
