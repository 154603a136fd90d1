"""The metadata of a GGUF file without its lists, in milliseconds; the ``gguf`` library takes seconds for a vocabulary.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orca_core.errors import ModelLoadError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Type in the file -> ``struct`` format of it, little-endian."""


def read_gguf_header(source: str, file: Path) -> dict[str, object]:
    """Metadata by key: numbers, strings and lists of numbers; lists of strings are left out.

    Raises ``ModelLoadError``; ``source`` is for its message.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise ModelLoadError(source, f"cannot read {file.name}: {error.strerror}") from error
    except (ValueError, struct.error, KeyError, RecursionError) as error:
        raise ModelLoadError(source, f"cannot read {file.name}: it is damaged, or no GGUF file") from error


class _Reader:
    """Walks over the file. Raises ``ValueError``, ``struct.error`` and ``KeyError`` where it is wrong."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> dict[str, object]:
        self._at = len(_MAGIC)
        version, _, n_keys = self._take("<IQQ")
        if self._data[: len(_MAGIC)] != _MAGIC or version not in _VERSIONS:
            raise ValueError("no GGUF file")
        values: dict[str, object] = {}
        for _ in range(n_keys):
            key = self._string()
            value = self._value(self._number("I"))
            if value is not None:
                values[key] = value
        return values

    def _value(self, kind: int) -> object:
        """``None`` for a list of strings or of lists."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._take("<IQ")
        if kind in _NUMBERS:
            return list(self._take(f"<{count}{_NUMBERS[kind]}"))
        for _ in range(count):
            self._skip(kind)
        return None

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._advance(self._number("Q"))
        else:
            self._value(kind)

    def _string(self) -> str:
        start = self._advance(self._number("Q"))
        return self._data[start : self._at].decode()

    def _advance(self, n_bytes: int) -> int:
        """Go on; where it was before."""
        start = self._at
        self._at = start + n_bytes
        if self._at > len(self._data):
            raise ValueError("cut off")
        return start

    def _number(self, kind: str) -> int:
        number: int = self._take(f"<{kind}")[0]
        return number

    def _take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self._data, self._advance(struct.calcsize(layout)))
