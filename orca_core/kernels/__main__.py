"""``python -m orca_core.kernels``: compile them for all CPUs of this machine's kind. Fills an image."""

from __future__ import annotations

import platform
import sys

from orca_core.kernels.build import build
from orca_core.kernels.variants import VARIANTS


def main() -> None:
    """Names what it made. Where no kernels are written for such machines, nothing. Raises ``KernelError``."""
    for variant in VARIANTS:
        if variant.machine == platform.machine():
            sys.stdout.write(f"{variant.name}: {build(variant.flags)}\n")


if __name__ == "__main__":
    main()
