"""From token ids to text, one token at a time.

What the decoders here return, joined, equals one decode of all ids by the ``tokenizers`` library, byte for byte, also
where the bytes are no UTF-8. Text is given out as soon as nothing that may follow can change it, so a byte-level
tokenizer holds back three bytes at most. The library reads a run of byte *fallback* tokens as a whole (if any of it is
invalid, each of its bytes becomes U+FFFD): there the run is given out when the next ordinary token ends it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from orca_core.detokenizer.pieces import DecoderRules, Family, PieceTable

_REPLACEMENT: Final = "\ufffd"
_MAX_HELD_TOKENS: Final = 8
"""How long the window decoder waits for a sequence to become valid: no character needs more tokens."""


class IncrementalDecoder(Protocol):
    """Text of one sequence of tokens. What ``push`` and ``finish`` return, joined, is the decode of all ids."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What is still held back. Call once, last."""
        ...


class ByteLevelDecoder:
    """Every token is bytes. Invalid ones become U+FFFD as in Unicode 16, section 3.9 ("maximal subparts").

    Most tokens are whole characters, and most come where no bytes are held: their text is looked up.
    """

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds = False  # bytes that are no character yet

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
        if not self._holds:
            text = self._pieces.whole_text(token_id)
            if text is not None:
                return text
        piece = self._pieces(token_id)
        if not isinstance(piece, bytes):
            return ""
        text = self._utf8.decode(piece)
        self._holds = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """See ``IncrementalDecoder``."""
        self._holds = False
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder:
    """Tokens are text, but for runs of byte tokens."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._n_strip = pieces.rules.n_strip

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
        piece = self._pieces(token_id)
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        # an id without a piece does not end the run: it is not there
        return "" if piece is None else self._strip(self._end_run() + piece)

    def finish(self) -> str:
        """See ``IncrementalDecoder``."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        """SentencePiece puts a space before the first word; a decode takes it off the start of the whole text."""
        if not self._n_strip or not text:
            return text
        left = text.lstrip(" ")
        n_spaces = min(len(text) - len(left), self._n_strip)
        # stripping goes on only while there was nothing but stripped spaces
        self._n_strip = self._n_strip - n_spaces if n_spaces == len(text) else 0
        return text[n_spaces:]


class MetaspaceDecoder:
    """Tokens are text; the first one loses its marks, in the others they are spaces."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._is_first = pieces.rules.first_loses_mark

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
        piece = self._pieces(token_id)
        if not isinstance(piece, str):
            return ""
        space = "" if self._is_first else " "
        self._is_first = False
        return piece.replace(self._pieces.rules.mark, space)

    def finish(self) -> str:
        """See ``IncrementalDecoder``."""
        return ""


class WindowDecoder:
    """For any other tokenizer: decodes the last few tokens with and without the new one, and takes the difference.

    Equal to one decode where a token's text depends on the token before it and on nothing else. ``is_text(id)``: False
    for ids that a decode leaves out (special, unknown); as context they would hide the token before them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_text = is_text
        self._ids: list[int] = []
        self._n_read = 0  # tokens of the window whose text is out already

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
        if not self._is_text(token_id):
            return ""
        self._ids.append(token_id)
        new = self._new_text()
        if new.endswith(_REPLACEMENT) and len(self._ids) - self._n_read < _MAX_HELD_TOKENS:
            return ""
        # what is out becomes the context of what follows: spaces depend on the token before
        self._ids, self._n_read = self._ids[self._n_read :], len(self._ids) - self._n_read
        return new

    def finish(self) -> str:
        """See ``IncrementalDecoder``."""
        return self._new_text()

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._n_read])) :]


def decoder_for(pieces: PieceTable) -> IncrementalDecoder:
    """A fresh decoder of the pieces' family."""
    match pieces.rules.family:
        case Family.BYTE_LEVEL:
            return ByteLevelDecoder(pieces)
        case Family.BYTE_FALLBACK:
            return ByteFallbackDecoder(pieces)
        case Family.METASPACE:
            return MetaspaceDecoder(pieces)


def spell(piece: str | bytes | None, rules: DecoderRules) -> bytes:
    """The bytes one piece adds to the middle of a text."""
    if piece is None:
        return b""
    if isinstance(piece, bytes):
        return piece
    return (piece.replace(rules.mark, " ") if rules.family is Family.METASPACE else piece).encode()
