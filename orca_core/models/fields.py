"""Typed reading of the untyped values of a configuration file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeGuard

from orca_core.errors import ModelLoadError
from orca_core.models.config import MAX_INT32

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


MAX_LAYERS: Final = 4096
MAX_INT64: Final = 2**63 - 1


class Fields:
    """Typed reading of an untyped mapping from a file: a wrong or missing value is a ``ModelLoadError`` naming it.

    ``prefix``: before every name in the file. ``aliases``: names that this file has other words for.
    """

    def __init__(
        self, source: str, values: Mapping[str, object], prefix: str = "", aliases: Mapping[str, str] = _NO_ALIASES
    ) -> None:
        self._source = source
        self._values = values
        self._prefix = prefix
        self._aliases = aliases

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(self._key(name)) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of at most 64 bits; required where there is no default."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        if abs(value) > MAX_INT64:
            raise self.error(name, "is beyond all bounds")
        return value

    def window(self, name: str, default: int | None = None) -> int | None:
        """Positions a row sees, or ``None`` where it is null; see ``optional_integer``.

        Some files say "all of them" with a number above every length: at most ``MAX_INT32`` is told, which no row
        reaches either.
        """
        value = self.optional_integer(name, default)
        return None if value is None else min(value, MAX_INT32)

    def layer_count(self, name: str) -> int:
        """A number of layers, small enough to make a list of them."""
        count = self.integer(name)
        if not 1 <= count <= MAX_LAYERS:
            raise self.error(name, f"must be from 1 to {MAX_LAYERS}")
        return count

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required where there is no default."""
        value = self._get(name, default)
        if not _is_number(value):
            raise self.error(name, "must be a finite number")
        return float(value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer, or ``None`` where it is null; the default only where there is no such field."""
        return default if self._key(name) not in self._values else self.integer(name) if self.has(name) else None

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A finite number, or ``None`` where it is null; the default only where there is no such field."""
        return default if self._key(name) not in self._values else self.number(name) if self.has(name) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers; required."""
        values = self._get(name, None)
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise self.error(name, "must be a list of finite numbers")
        return tuple(float(value) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required where there is no default."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def section(self, name: str) -> Fields:
        """A mapping inside this one; empty where there is none."""
        value = self._values.get(self._key(name))
        if value is None:
            return Fields(self._source, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(self._source, value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or ``None`` where there is none."""
        values = self._values.get(self._key(name))
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(name, "must be a list of strings")
        return tuple(values)

    def ids(self, name: str) -> tuple[int, ...]:
        """Whole numbers: one, a list of them, or nothing at all."""
        value = self._values.get(self._key(name))
        values: Iterable[object] = value if isinstance(value, list) else () if value is None else (value,)
        ids: list[int] = []
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.error(name, "must be a whole number or a list of them")
            ids.append(item)
        return tuple(ids)

    def error(self, name: str, reason: str) -> ModelLoadError:
        """The error for one field."""
        return ModelLoadError(self._source, f"configuration: {self._key(name)} {reason}")

    def _key(self, name: str) -> str:
        return self._prefix + self._aliases.get(name, name)

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(self._key(name))
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with more digits than a float has
        return False
