"""The tree that the rules are about: its folders, its version, its files."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orca_core", "deployment")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(ROOT / "deployment" / "pb")]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def config_names() -> list[str]:
    return [path.name for path in sorted((ROOT / "configs").glob("*.yaml"))]
