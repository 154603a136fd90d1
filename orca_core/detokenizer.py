"""From token ids to text, one token at a time.

Byte-level BPE and SentencePiece tokenizers share one model here: every token has its bytes, and the text is the UTF-8
reading of all bytes in a row. Bytes that no continuation can make valid become U+FFFD at once, as in a decode of the
whole (Unicode 3.9, "maximal subpart"); only a sequence that is valid so far waits, for three bytes at most.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "\u2581"
_REPLACEMENT: Final = "\ufffd"
_MAX_HELD_TOKENS: Final = 8
"""How long the window decoder waits for a sequence to become valid: no character needs more tokens."""


class IncrementalDecoder(Protocol):
    """Text of one sequence of tokens. What ``push`` and ``finish`` return, joined, is the decode of all ids."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What is still held back: the reading of an unfinished sequence. Call once."""
        ...


class BytesDecoder:
    """For tokenizers whose tokens are bytes. ``piece(id)``: the bytes of a token; empty for special ones."""

    def __init__(self, piece: Callable[[int], bytes], strips_space: bool) -> None:
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = strips_space

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
        return self._strip(self._utf8.decode(self._piece(token_id)))

    def finish(self) -> str:
        """See ``IncrementalDecoder``."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        """SentencePiece puts a space before the first word; its decode takes one off the start."""
        if not self._strip_next or not text:
            return text
        self._strip_next = False
        return text.removeprefix(" ")


class WindowDecoder:
    """For any other tokenizer: decodes the last few tokens with and without the new one, and takes the difference."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._n_read = 0  # tokens of the window whose text is out already

    def push(self, token_id: int) -> str:
        """See ``IncrementalDecoder``."""
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
        old = self._decode(self._ids[: self._n_read])
        return self._decode(self._ids)[len(old) :]


class PieceTable:
    """The bytes of each token, for tokenizers whose decoder is made of known parts.

    ``decoder``: the ``decoder`` section of a tokenizer.json. ``tokens``: id -> token. ``special``: ids without text.
    """

    def __init__(
        self, decoder: Mapping[str, Any], tokens: Callable[[int], str | None], special: frozenset[int]
    ) -> None:
        parts = _parts(decoder)
        kinds = [part["type"] for part in parts]
        self._tokens = tokens
        self._special = special
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._replace = [_replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")]
        self.strips_space = any(_strips_space(part) for part in parts)
        self.is_known = self._byte_level or (
            set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
            and None not in self._replace
            and all(_is_plain_strip(part) for part in parts if part["type"] == "Strip")
            and bool(kinds)
        )

    def piece(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for special and unknown ids."""
        token = None if token_id in self._special else self._tokens(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(char) for char in token]
            # an added token is spelled as it is
            return bytes(v for v in values if v is not None) if None not in values else token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for pair in self._replace:
            if pair is not None:
                token = token.replace(*pair)
        return token.encode("utf-8", "surrogatepass")


def _parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder] if decoder else []


def _replacement(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """(old, new) of a part that replaces a plain string."""
    if part["type"] == "Metaspace":
        return part.get("replacement", _METASPACE), " "
    pattern = part["pattern"]
    return (pattern["String"], part["content"]) if "String" in pattern else None


def _strips_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return str(part.get("prepend_scheme", "always")) != "never"
    return part["type"] == "Strip" and part.get("start", 0) > 0


def _is_plain_strip(part: Mapping[str, Any]) -> bool:
    return bool(part.get("content") == " " and part.get("start", 0) <= 1 and part.get("stop", 0) == 0)


def _byte_table() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: printable ones stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    return table | {chr(0x100 + index): value for index, value in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = _byte_table()
