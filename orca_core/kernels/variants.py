"""Which kernels fit this CPU, and whether they are wanted."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from orca_core.kernels.build import KernelError, build
from orca_core.kernels.native import Kernels

logger = logging.getLogger(__name__)

SWITCH: Final = "ORCA_KERNELS"
"""Environment variable: ``off`` = torch computes everything; the name of a variant = that one."""

_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the sources. ``needs``: features of the CPU, as Linux names them; ``flags``: the compiler's.

    The sources speak AVX-512; ``avx2.h`` says it in AVX2. A CPU with AMX gets the first; another kind of machine (ARM)
    has none, and computes in torch.
    """

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


VARIANTS: Final = (
    Variant(
        "avx512_bf16",
        "x86_64",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "avx2", "bmi2"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mavx2", "-mbmi2",
         "-mprefer-vector-width=512"),
    ),
    Variant(
        "avx512",
        "x86_64",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx2", "bmi2"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2", "-mbmi2",
         "-mprefer-vector-width=512"),
    ),
    Variant(
        "avx2",
        "x86_64",
        frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
        ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt"),
    ),
)  # fmt: skip


def cpu_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """What Linux says the CPU can do; nothing where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def choose_variant(features: frozenset[str], machine: str, variants: tuple[Variant, ...] = VARIANTS) -> Variant:
    """The first that fits. Raises ``KernelError`` where none does."""
    for variant in variants:
        if variant.machine == machine and variant.needs <= features:
            return variant
    names = ", ".join(variant.name for variant in variants)
    raise KernelError(f"this CPU has none of the instruction sets they are written for ({names})")


def find_kernels() -> Kernels:
    """The kernels for this CPU, compiled if need be. Raises ``KernelError`` where there are none to be had."""
    chosen = os.environ.get(SWITCH, "").lower()
    if chosen in ("off", "0", "no", "false"):
        raise KernelError(f"they are turned off (${SWITCH})")
    named = tuple(variant for variant in VARIANTS if variant.name == chosen)
    return load_variant(choose_variant(cpu_features(), platform.machine(), named or VARIANTS))


@cache
def load_variant(variant: Variant) -> Kernels:
    """A variant that this CPU can run, compiled if need be. Raises ``KernelError``."""
    library = build(variant.flags)
    try:
        return Kernels(library)
    except (OSError, AttributeError) as error:
        raise KernelError(f"{library} cannot be loaded: {error}") from error
