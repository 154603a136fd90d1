"""What each token spells: the ``decoder`` section of a tokenizer.json, read as rules that work token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Family(Enum):
    """How the pieces of a text are put together."""

    BYTE_LEVEL = "byte_level"
    """Every token is bytes; the text is the UTF-8 reading of all of them in a row (GPT-2, Llama 3, Qwen)."""
    BYTE_FALLBACK = "byte_fallback"
    """Tokens are text; runs of byte tokens are read as UTF-8, each run by itself (SentencePiece: Llama 2, Gemma)."""
    METASPACE = "metaspace"
    """Tokens are text; spaces are spelled by a mark, which the first token loses."""


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """``replace``: (old, new), applied to every token that is no byte token. ``n_strip``: spaces that the whole text
    loses at its start. ``mark``: how a space is spelled, and whether the first token loses it (METASPACE).
    """

    family: Family
    replace: tuple[tuple[str, str], ...] = ()
    n_strip: int = 0
    mark: str = "\u2581"
    first_loses_mark: bool = False


def read_rules(decoder: Mapping[str, Any] | None) -> DecoderRules | None:
    """The rules of a decoder; ``None`` for one this project has no token-by-token reading of."""
    parts = _flatten(decoder or {})
    kinds = [str(part["type"]) for part in parts]
    if kinds == ["ByteLevel"]:
        return DecoderRules(Family.BYTE_LEVEL)
    if kinds == ["Metaspace"]:
        loses = parts[0].get("prepend_scheme", "always") != "never"
        return DecoderRules(Family.METASPACE, mark=str(parts[0]["replacement"]), first_loses_mark=loses)
    # in this order only: a Replace behind the Fuse would see what byte tokens spell, a Strip before it every token
    if not re.fullmatch(r"(Replace )*ByteFallback Fuse (Strip )?", "".join(f"{kind} " for kind in kinds)):
        return None
    replace = [_plain_replacement(part) for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    if None in replace or any(part["content"] != " " or part["stop"] != 0 for part in strips):
        return None
    return DecoderRules(
        Family.BYTE_FALLBACK,
        tuple(pair for pair in replace if pair is not None),
        n_strip=sum(int(part["start"]) for part in strips),
    )


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder] if decoder else []


def _plain_replacement(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """(old, new) of a part that replaces a plain string; ``None`` for a regular expression."""
    pattern = part["pattern"]
    return (str(pattern["String"]), str(part["content"])) if "String" in pattern else None


class PieceTable:
    """The piece of each token. ``token``: id -> how the vocabulary spells it; ``special``: ids without text."""

    def __init__(self, rules: DecoderRules, token: Callable[[int], str | None], special: frozenset[int]) -> None:
        self.rules = rules
        self._token = token
        self._special = special
        self._known: dict[int, str | bytes | None] = {}  # no more than the vocabulary has
        self._whole: dict[int, str | None] = {}

    def __call__(self, token_id: int) -> str | bytes | None:
        """Bytes for what counts as bytes, text for what counts as text; ``None`` for ids that add nothing at all."""
        if token_id not in self._known:
            self._known[token_id] = self._work_out(token_id)
        return self._known[token_id]

    def whole_text(self, token_id: int) -> str | None:
        """What a token adds where its bytes stand alone; ``None`` where they are not whole characters in UTF-8."""
        try:
            return self._whole[token_id]
        except KeyError:
            text = self._whole[token_id] = self._read_alone(token_id)
            return text

    def _read_alone(self, token_id: int) -> str | None:
        piece = self(token_id)
        try:
            return piece.decode() if isinstance(piece, bytes) else piece or ""
        except UnicodeDecodeError:
            return None

    def _work_out(self, token_id: int) -> str | bytes | None:
        token = None if token_id in self._special else self._token(token_id)
        if token is None:
            return None
        rules = self.rules
        if rules.family is Family.BYTE_LEVEL:
            values = [_BYTE_OF.get(char) for char in token]
            # a token with a character outside the byte alphabet was added by hand and is spelled as it is
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if rules.family is Family.METASPACE:
            return token
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        for old, new in rules.replace:
            token = token.replace(old, new)
        return token


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = _byte_alphabet()
