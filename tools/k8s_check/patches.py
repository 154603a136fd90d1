"""Patches of a kustomization that meet no object: kustomize says nothing, and nothing changes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from k8s_check.render import Object

_NAMES: Final = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_DELETE: Final = re.compile(r"""\$patch["']?\s*:\s*["']?delete""")
_HASH: Final = re.compile(r"-[a-z0-9]{10}$")


def unmatched(folder: Path, objects: list[Object]) -> Iterator[str]:
    """Targets by kind and name that are none of the objects, of this folder's own patches."""
    file = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    own: Any = {} if file is None else yaml.safe_load(file.read_text())
    if own.get("namePrefix") or own.get("nameSuffix"):
        return  # patches mean the names before these
    there = [(each["kind"], name) for each in objects for name in _names(str(each["metadata"]["name"]))]
    for each in (*(own.get("patches") or []), *(own.get("patchesJson6902") or [])):
        target = each.get("target") or {}
        if not target or _removes(each, folder) or any(_meets(target, kind, name) for kind, name in there):
            continue
        said = "/".join(str(target[key]) for key in ("kind", "name") if key in target)
        yield f"patches: no object is {said}: kustomize changes nothing{_nearest(target, there)}"


def _names(name: str) -> set[str]:
    """As it is, and as a generator's was before kustomize appended its hash."""
    return {name, _HASH.sub("", name)}


def _meets(target: Mapping[str, Any], kind: str, name: str) -> bool:
    """Both are regular expressions for the whole; what else a target may say is left to kustomize."""
    try:
        return all(
            re.fullmatch(str(target.get(key) or ".*"), value) is not None
            for key, value in (("kind", kind), ("name", name))
        )
    except re.error:
        return True


def _removes(each: Mapping[str, Any], folder: Path) -> bool:
    """Whether it takes its object away, which then is not among the rendered ones."""
    path = folder / str(each.get("path"))
    text = str(each.get("patch") or (path.read_text() if path.is_file() else ""))
    return _DELETE.search(text) is not None


def _nearest(target: Mapping[str, Any], there: list[tuple[str, str]]) -> str:
    kinds = sorted({kind for kind, _ in there})
    kind, name = str(target.get("kind") or ""), str(target.get("name") or "")
    for wanted, known in ((kind, kinds), (name, sorted({one for of, one in there if of == kind}))):
        near = difflib.get_close_matches(wanted, known, n=1)
        if wanted and wanted not in known and near:
            return f"; did you mean {near[0]}?"
    return ""
