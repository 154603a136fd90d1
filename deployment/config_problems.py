"""What is wrong with a mapping that was read from YAML, each as a dotted name and one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import BaseModel, ValidationError

from orca_core.errors import ConfigError, ConfigProblemsError


def unknown_key(path: str, key: str, known: list[str]) -> ConfigError:
    """The error for a key nobody knows, with the nearest one that is."""
    near = _nearest(key, known)
    prefix = path.rpartition(".")[0]
    hint = f"did you mean {prefix + '.' if prefix else ''}{near}?" if near else f"known: {', '.join(known)}"
    return ConfigError(path, f"unknown key; {hint}")


def _nearest(key: str, known: list[str]) -> str | None:
    """The known key that may have been meant."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return near[0] if near else None


def config_errors(problems: Sequence[ConfigError]) -> ConfigError:
    """One error for at least one problem; the first of each field is kept."""
    kept = list({problem.field: problem for problem in reversed(problems)}.values())[::-1]
    if len(kept) == 1:
        return kept[0]
    return ConfigProblemsError(tuple(each.field for each in kept), tuple(each.reason for each in kept))


def any_of(fields: tuple[str, ...], wrong: AbstractSet[str]) -> bool:
    """Whether one of the fields, or the whole section of one, is among those that are wrong."""
    return any(field in wrong or field.partition(".")[0] in wrong for field in fields)


def without(known: Mapping[str, Any], wrong: AbstractSet[str]) -> dict[str, Any]:
    """What is left of the sections without those fields."""
    kept: dict[str, Any] = {}
    for name, section in known.items():
        if isinstance(section, Mapping) and name not in wrong:
            kept[name] = {key: value for key, value in section.items() if f"{name}.{key}" not in wrong}
    return kept


def sort_out(
    model: type[BaseModel], values: Mapping[Any, Any], prefix: str
) -> tuple[dict[str, Any], list[ConfigError], set[str]]:
    """What can be validated, and an error for each key, in sections too, that is not a field or holds no mapping.

    Last, the names of the fields that were given in such a way, or may have been.
    """
    known: dict[str, Any] = {}
    problems: list[ConfigError] = []
    wrong: set[str] = set()
    names = list(model.model_fields)
    for key, value in values.items():
        path, field = f"{prefix}{key}", model.model_fields.get(str(key))
        if field is None:
            problems.append(unknown_key(path, str(key), names))
            meant = _nearest(str(key), names)
            if meant is not None and meant not in values:
                wrong.add(f"{prefix}{meant}")
            continue
        known[key] = value
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            continue
        if isinstance(value, Mapping):
            known[key], inner, wrong_in_it = sort_out(field.annotation, value, f"{path}.")
            problems += inner
            wrong |= wrong_in_it
        elif value is not None and not isinstance(value, BaseModel):
            problems.append(ConfigError(path, "must be a mapping"))
            wrong.add(path)
            del known[key]
    return known, problems, wrong


def found_by_pydantic(error: ValidationError) -> Iterator[ConfigError]:
    """All that pydantic found, each as a dotted name and one line."""
    for each in error.errors(include_url=False, include_context=False):
        names = [part for part in each["loc"] if isinstance(part, int) or part.isidentifier()]
        message = str(each["msg"]).removeprefix("Value error, ").replace("\n", " ")
        reason = message.replace("Input should be", "must be", 1)
        yield ConfigError(".".join(str(part) for part in names) or "args", reason)
