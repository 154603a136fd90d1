"""Kubernetes' numbers with units: 500m, 3k, 4Gi, 1e3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_QUANTITY: Final = re.compile(r"^([+-]?\d*\.?\d+|\d+\.)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?$")
_SCALES: Final[Mapping[str, float]] = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3,
    **{unit: 1000.0 ** (power + 1) for power, unit in enumerate("kMGTPE")},
    **{f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")},
}  # fmt: skip


def number(quantity: str | float | None) -> float:
    """What a quantity stands for: CPUs, bytes, pieces; 0 where there is none. Raises ``ValueError`` for no quantity."""
    if quantity is None:
        return 0.0
    found = _QUANTITY.match(str(quantity))
    if found is None:
        raise ValueError(f"{quantity!r} is no quantity")
    unit = found[2] or ""
    return float(found[1] + unit) if unit not in _SCALES else float(found[1]) * _SCALES[unit]
