"""Numbers out of many numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

QUANTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def percentile(values: Sequence[float], quantile: float) -> float:
    """Linear interpolation between the two nearest ranks (numpy's default). ``quantile``: 0 to 1; ``values``: any."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * quantile
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize_ms(values_s: Sequence[float]) -> dict[str, float]:
    """``mean``, ``p50``, ``p95``, ``p99`` in milliseconds of values in seconds; zeros where there are none."""
    if not values_s:
        return dict.fromkeys(("mean", *QUANTILES), 0.0)
    mean = {"mean": statistics.fmean(values_s) * 1e3}
    return mean | {name: percentile(values_s, quantile) * 1e3 for name, quantile in QUANTILES.items()}


def medians(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every number that all records have; nested mappings alike, anything else is left out."""
    result: dict[str, Any] = {}
    for key, value in records[0].items():
        if not all(key in record for record in records):
            continue
        if isinstance(value, Mapping):
            result[key] = medians([record[key] for record in records])
        elif isinstance(value, int | float) and not isinstance(value, bool):
            result[key] = statistics.median(record[key] for record in records)
    return result


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """``one / other`` for every number both have; nested mappings alike. Where ``other`` is zero: left out."""
    result: dict[str, Any] = {}
    for key in one.keys() & other.keys():
        value, base = one[key], other[key]
        if isinstance(value, Mapping):
            result[key] = ratios(value, base)
        elif isinstance(value, int | float) and base:
            result[key] = value / base
    return result
