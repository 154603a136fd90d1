"""Every table fits a terminal of 80 columns, also where the numbers are large."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.table import Table

from deployment.bench import front, report, roofline_report
from deployment.bench.ceilings import Ceilings
from deployment.bench.exactness import Difference, exactness_table
from deployment.bench.front import SERVERS
from deployment.bench.gaps import Gaps, gaps_table
from deployment.bench.laps import PARTS
from deployment.bench.shapes import Point, Shape
from deployment.bench.tax import tax_tables

LARGE = 123_456.789


def gaps_tables() -> list[Table]:
    return [gaps_table([Gaps(131_072, 131_064, 9999.9, 9999.9, 9999.9, LARGE, 1.0)], 128)]


def exactness_tables() -> list[Table]:
    return [exactness_table([Difference("resumed from the middle, in a batch of 16", 9999, 9999, 9999.5)], "bfloat16")]


def roofline_all() -> list[Table]:
    reads = {"prefetched loads, 128 thread(s)": 9999.0}
    ceilings = Ceilings(reads, {"instruction, 128 thread(s)": 99_999.0}, "bfloat16")
    parts = dict.fromkeys(PARTS, 9999.99)
    point = Point(Shape("initiation", 32, 131_072), 9999.9, 9999.9, 9999.9, parts, 9999.9, 9999.9, 20, 1.0)
    return roofline_report.tables(roofline_report.Measured(Mock(), ceilings, [point], []))


def tax_all() -> list[Table]:
    row = {"tokens_per_s": LARGE, "foreign_cpu": 1.0}
    return tax_tables({"alone": row, "service": row, "ratio": 0.9})


def front_tables() -> list[Table]:
    row = {
        "tokens_per_s": LARGE, "messages_per_s": LARGE, "tokens_per_message": 256.0, "client_core": 0.99,
        "foreign_cpu": 1.0, "first_token_ms": {"p50": 1234.56, "p99": 1234.56},
    }  # fmt: skip
    ratios = {"tokens_per_s": 12.345, "messages_per_s": 12.345}
    case = {"replicas": 128, "to_bare": ratios, "to_plain": ratios, "added_ms": {"p50": 1234.56, "p99": 1234.56}}
    case |= dict.fromkeys(SERVERS, row)
    return front.tables({"summary": [{**case, "streams": 1024}, {**case, "streams": 0}]})


def offline_tables() -> list[Table]:
    rates = {"requests_per_s": LARGE, "output_tok_per_s": LARGE, "elapsed_s": LARGE, "foreign_cpu": 1.0}
    each = {name: {"mean": LARGE, "p50": LARGE, "p95": LARGE, "p99": LARGE} for name in report.LATENCIES}
    bound = {"ideal": 1.5, "arrival_order": 1.5, "achieved": 1.5, "achieved_at_median_cost": 1.5}
    bound |= {"achieved_of_ideal": 0.5, "achieved_of_arrival_order": 0.5}
    column = {**rates, **each}
    return report.tables({"policies": {"iteration": column, "static": column}, "ratios": column, "bound": bound})


@pytest.mark.parametrize("make", [gaps_tables, exactness_tables, roofline_all, tax_all, front_tables, offline_tables])
def test_a_table_fits_80_columns(make: Callable[[], list[Table]]) -> None:
    for table in make():
        lines = {width: drawn(table, width) for width in (80, 300)}
        assert max(len(line) for line in lines[300]) <= 80
        assert lines[80] == lines[300]


def drawn(table: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
