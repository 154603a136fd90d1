"""From token ids to text, one token at a time: the same text as one decode of them all."""

from __future__ import annotations

from orca_core.detokenizer.decoding import IncrementalDecoder, WindowDecoder, decoder_for, spell
from orca_core.detokenizer.pieces import PieceTable, read_rules

__all__ = ["IncrementalDecoder", "PieceTable", "WindowDecoder", "decoder_for", "read_rules", "spell"]
