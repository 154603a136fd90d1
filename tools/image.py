"""``make image``: the Dockerfile built, by buildah, docker or podman, under the tag the manifests name.

``ARGS`` of make go through to it: ``make image ARGS="--build-arg BASE=…"``. Standard library and ``k8s_check.facts``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from k8s_check.facts import Facts, read_facts

ROOT: Final = Path(__file__).resolve().parent.parent
BUILDERS: Final = {
    "buildah": ("buildah", "bud"),
    "docker": ("docker", "build"),
    "podman": ("podman", "build"),
}
TORCH: Final = {
    "cpu": ("orca-serve", "https://download.pytorch.org/whl/cpu"),
    "cuda": ("orca-serve-cuda", "https://pypi.org/simple"),
}
"""Name of the image, and the index whose build of the pinned torch goes into it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; returns the builder's exit status, 2 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--for", dest="device", choices=sorted(TORCH), default="cpu", help="which torch (default: cpu)")
    parser.add_argument("--builder", choices=sorted(BUILDERS), help="default: the first that is there and works")
    parser.add_argument("--print", dest="only_print", action="store_true", help="say the command and do nothing")
    given, rest = parser.parse_known_args(arguments)
    builder = given.builder or find_builder(works)
    if builder is None:
        print(f"image: none of {', '.join(BUILDERS)} is there, or its daemon does not answer", file=sys.stderr)
        return 2
    command = command_line(builder, given.device, read_facts(ROOT), rest)
    print("image:", *command, flush=True)
    return 0 if given.only_print else subprocess.run(command, cwd=ROOT, check=False).returncode


def command_line(builder: str, device: str, facts: Facts, rest: Sequence[str]) -> list[str]:
    """What is run in the root of the repository. ``rest`` comes last, so that it can override."""
    name, index = TORCH[device]
    return [*BUILDERS[builder], "-t", f"{name}:{facts.tag}", "--build-arg", f"TORCH_INDEX={index}", *rest, "."]


def find_builder(is_usable: Callable[[str], bool]) -> str | None:
    """The first that is; ``None`` where none is."""
    return next((builder for builder in BUILDERS if is_usable(builder)), None)


def works(builder: str) -> bool:
    """Docker's client is often there without an engine."""
    if shutil.which(builder) is None:
        return False
    return subprocess.run([builder, "info"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
