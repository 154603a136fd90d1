"""From the points of a roofline to a record in plain JSON values, to tables, and to a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

from deployment.bench.ceilings import Ceilings
from deployment.bench.laps import PARTS
from deployment.bench.machine import describe_machine
from deployment.bench.roofline import Subject
from deployment.bench.shapes import Point, Shape

SCHEMA: Final = "orca-serve/bench-roofline/1"
_NAMES: Final = {"norm_rope_activation": "norm", "scheduler": "choice", "hand_over": "hand"}
"""Of parts, where a column is narrow."""
_COLORS: Final = dict(zip(
    PARTS, ("#4f87b8", "#d95f02", "#86aed1", "#66a61e", "#a6761d", "#e6ab02", "#7570b3", "#999999"), strict=True,
))  # fmt: skip
_INK: Final = "#222222"


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything a record is made of. ``left_out``: shapes that were not measured, and why."""

    subject: Subject
    ceilings: Ceilings
    points: Sequence[Point]
    left_out: Sequence[tuple[Shape, str]]

    def of_kind(self, kind: str) -> list[Point]:
        """Increments, or initiations."""
        return [point for point in self.points if point.shape.kind == kind]


def make_record(measured: Measured) -> dict[str, Any]:
    """For JSON. ``increments``, ``initiations``: one entry a shape, milliseconds; ``parts`` add up to ``ms``."""
    subject, decoder = measured.subject, measured.subject.compute.decoder
    return {
        "schema": SCHEMA,
        "machine": describe_machine(),
        **subject.record(),
        "weight_bytes": decoder.weight_bytes,
        "decoder": type(decoder).__name__,
        "has_text": subject.has_text,
        "threads": torch.get_num_threads(),
        "ceilings": measured.ceilings.record(),
        "increments": [subject.record() | point.record() for point in measured.of_kind("increment")],
        "initiations": [subject.record() | point.record() for point in measured.of_kind("initiation")],
        "left_out": [
            {"kind": shape.kind, "batch": shape.batch, "context": shape.context, "why": why}
            for shape, why in measured.left_out
        ],
    }


def tables(measured: Measured) -> list[Table]:
    """The ceilings, the points against their floors, and where their time goes."""
    return [_ceilings_table(measured.ceilings), _points_table(measured.points), _parts_table(measured.points)]


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table


def _ms(value: float) -> str:
    """Hundredths, where they say something."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ceilings_table(ceilings: Ceilings) -> Table:
    table = _table("ceilings", "", "rate")
    for name, rate in ceilings.read_gb_s.items():
        table.add_row(f"read: {name}", f"{rate:.1f} GB/s")
    for name, rate in ceilings.product_gflop_s.items():
        table.add_row(f"{ceilings.product_dtype} product: {name}", f"{rate:.0f} GFLOP/s")
    return table


def _points_table(points: Sequence[Point]) -> Table:
    table = _table("turns, ms", "", "median", "best", "read", "product", "floor", "/floor", "foreign")
    for point in points:
        numbers = (point.ms, point.best_ms, point.read_ms, point.product_ms, point.floor_ms)
        table.add_row(
            point.shape.label, *(f"{ms:.1f}" for ms in numbers), f"{point.ratio:.2f}", f"{point.foreign_cpu:.0%}"
        )
    return table


def _parts_table(points: Sequence[Point]) -> Table:
    table = _table("where it goes, ms", "", *(_NAMES.get(part, part) for part in PARTS))
    for point in points:
        table.add_row(point.shape.label, *(_ms(point.parts[part]) for part in PARTS))
    return table


def draw(path: Path, measured: Measured) -> None:
    """A bar for each point: how many floors high it is, and of what. ``path``: PNG, or what its suffix says."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    kinds = [kind for kind in ("increment", "initiation") if measured.of_kind(kind)]
    widths = [len(measured.of_kind(kind)) for kind in kinds]
    figure = Figure(figsize=(2.5 + 0.85 * sum(widths), 5.2), layout="constrained")
    panels: Any = figure.subplots(1, len(kinds), squeeze=False, sharey=True, width_ratios=widths)
    for panel, kind in zip(panels[0], kinds, strict=True):
        _panel(panel, measured.of_kind(kind), f"{kind}s")
    panels[0, 0].set_ylabel("times the floor", color=_INK)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=_INK)
    subject, ceilings = measured.subject, measured.ceilings
    title = f"{subject.name}, {subject.dtype}, weights: {subject.quantization}; {ceilings.bytes_per_s / 1e9:.1f} GB/s"
    figure.suptitle(f"{title}, {ceilings.flop_per_s / 1e9:.0f} GFLOP/s", x=0.01, ha="left", fontsize=11, color=_INK)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, points: Sequence[Point], title: str) -> None:
    places = range(len(points))
    bottoms = [0.0] * len(points)
    for part in PARTS:
        heights = [point.parts[part] / point.floor_ms for point in points]
        axes.bar(
            places,
            heights,
            0.7,
            bottom=bottoms,
            color=_COLORS[part],
            label=part if part == "hand_over" else part.replace("_", ", "),
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, point, top in zip(places, points, bottoms, strict=True):
        axes.text(place, top, f"{point.ms:.1f} ms", ha="center", va="bottom", fontsize=8, color=_INK)
    axes.axhline(1.0, color=_INK, linewidth=1, linestyle="--", label="floor")
    axes.set_xticks(places, [point.shape.label.replace(" ", "\n", 1) for point in points], fontsize=8)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.tick_params(colors=_INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
