"""Which fields there are: what Kubernetes and KubeRay know is right, though no rule here looks at it.

The list is ``fields.txt``; affinity, other volumes or a sidecar's settings are the user's own business, and pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

_LIST: Final = Path(__file__).with_name("fields.txt")

Types = dict[str, dict[str, str]]
"""Of a type's name: the type of each of its fields, empty where it may be anything."""


@cache
def known() -> Types:
    """The list, read. A line that begins with a space goes on with the line before."""
    types: Types = {}
    fields: dict[str, str] = {}
    for line in _LIST.read_text().splitlines():
        words = line.split()
        if line.startswith("#") or not words:
            continue
        if not line.startswith(" "):
            fields = types[words.pop(0)] = {}
        fields.update((name, of) for name, _, of in (word.partition(":") for word in words))
    return types


def unknown(each: Any, kind: str) -> Iterator[tuple[str, str]]:
    """Place and trouble of every field that is not there, or is no mapping or list where one must be."""
    if kind in known():
        yield from _mapping(each, kind, "")


def _mapping(each: Any, kind: str, place: str) -> Iterator[tuple[str, str]]:
    if not isinstance(each, dict):
        yield place, "must be a mapping"
        return
    fields = known()[kind]
    for name, value in each.items():
        where = f"{place}.{name}" if place else str(name)
        if name not in fields:
            yield where, _unknown(str(name), kind)
        elif value is not None and fields[name]:  # the API server drops what is null
            yield from _value(value, fields[name], where)


def _value(value: Any, of: str, place: str) -> Iterator[tuple[str, str]]:
    if not of.startswith("["):
        yield from _mapping(value, of, place)
    elif not isinstance(value, list):
        yield place, "must be a list"
    elif inner := of.strip("[]"):
        for number, part in enumerate(value):
            yield from _mapping(part, inner, f"{place}.{number}")


def _unknown(name: str, kind: str) -> str:
    """Nearest in the same place, or anywhere: a field may be one level too high."""
    for names in (known()[kind], {each for fields in known().values() for each in fields}):
        near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
        if near:
            return f"unknown field; did you mean {near[0]}?"
    return "unknown field"
