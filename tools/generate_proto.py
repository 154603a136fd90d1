"""Generates `deployment/pb` from `proto/`; `--check` only says whether the committed code is fresh.

`-I deployment/pb=proto` maps the schema folder onto the package, so the generated imports are right as they come and
nothing is patched. There is no importable `proto` package: one would shadow proto-plus, which Ray needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("deployment/pb")


def main() -> int:
    """Generate, or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the committed code is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    for name in stale:
        print(f"{name} is not what proto/ gives; run: make proto", file=sys.stderr)
    return 1 if stale else 0


def generate(target: Path) -> None:
    """Write messages, stubs for type checkers and services below ``target``. Raises ``CalledProcessError``."""
    (target / PACKAGE).mkdir(parents=True, exist_ok=True)
    schemas = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}=proto"]
    command += [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *(str(PACKAGE / schema) for schema in schemas)], cwd=ROOT, check=True)


def stale_files() -> list[str]:
    """Generated files, relative to the root, that are missing, different or no longer generated."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated(Path(folder))
    committed = generated(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def generated(root: Path) -> dict[str, str]:
    """Text of each generated file below ``root`` by relative path."""
    files = sorted((root / PACKAGE).rglob("*_pb2*.py*"))
    return {str(path.relative_to(root)): path.read_text() for path in files if path.suffix in (".py", ".pyi")}


if __name__ == "__main__":
    sys.exit(main())
