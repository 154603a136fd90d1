"""Draws the composition of the batch over time, one panel for each policy, on one scale. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deployment.bench.composition import Composition, Stay, compose
from deployment.bench.offline import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INITIATION: Final = "#d95f02"
INCREMENTS: Final = ("#4f87b8", "#86aed1")
EMPTY: Final = "#f3f3f3"
_INK: Final = "#222222"
_WIDTH_INCHES: Final = 13.0
_TITLES: Final = {"iteration": "Iteration-level scheduling", "static": "Request-level scheduling (static batches)"}
_BAR: Final = 0.84
"""Height of a place's bar; places are one apart."""


def draw(path: Path, runs: Sequence[Run], caption: str) -> None:
    """Write a picture of the given runs, one panel each, to ``path`` (PNG, or what its suffix says)."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    compositions = [compose(run.iterations) for run in runs]
    n_places = max(composition.n_places for composition in compositions)
    end = max(run.elapsed_s for run in runs)
    height = max(0.34 * n_places, 0.9)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.4 + len(runs) * (height + 1.2)), layout="constrained")
    panels: Any = figure.subplots(len(runs), 1, squeeze=False)
    for panel, run, composition in zip(panels[:, 0], runs, compositions, strict=True):
        _panel(panel, run, composition, n_places, end)
    _legend(figure)
    panels[-1, 0].set_xlabel("seconds since all requests arrived", color=_INK)
    figure.suptitle(caption, x=0.01, ha="left", fontsize=11, color=_INK)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, run: Run, composition: Composition, n_places: int, end: float) -> None:
    """One policy: a bar for each stay, at its place; what shows through between bars is an empty place."""
    zero = run.iterations[0].started_s
    last = run.iterations[-1].ended_s - zero
    axes.barh(range(n_places), [last] * n_places, _BAR, color=EMPTY, edgecolor="#cfcfcf", hatch="////", linewidth=0)
    before = [0] * n_places  # stays at each place so far
    for number, stay in enumerate(composition.stays):
        _stay(axes, stay, str(number + 1), INCREMENTS[before[stay.place] % 2], zero, end)
        before[stay.place] += 1
    axes.set_xlim(0, end * 1.005)
    axes.set_ylim(n_places - 0.45, -0.55)
    axes.set_yticks(range(n_places), [str(place + 1) for place in range(n_places)])
    axes.set_ylabel("place in the batch", color=_INK)
    axes.tick_params(colors=_INK, length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    facts = (
        f"{len(run.results) / run.elapsed_s:.3f} requests/s, {len(run.iterations)} iterations, {run.elapsed_s:.1f} s"
    )
    axes.set_title(f"{_TITLES[run.policy]}:  {facts}", loc="left", fontsize=11, fontweight="bold", color=_INK, pad=22)
    _iteration_axis(axes, run, zero)


def _stay(axes: Axes, stay: Stay, label: str, color: str, zero: float, end: float) -> None:
    start, initiated, ended = (seconds - zero for seconds in (stay.started_s, stay.initiated_s, stay.ended_s))
    style: dict[str, Any] = {"height": _BAR, "edgecolor": "white", "linewidth": 0.6}
    axes.barh(stay.place, ended - start, left=start, color=color, **style)
    axes.barh(stay.place, initiated - start, left=start, color=INITIATION, **style)
    if ended - initiated > end * 0.012:
        middle = (initiated + ended) / 2
        axes.text(middle, stay.place, label, ha="center", va="center", fontsize=9, color="white",
                  fontweight="bold")  # fmt: skip


def _iteration_axis(axes: Axes, run: Run, zero: float) -> None:
    """The same time counted in iterations, along the top of the panel."""
    ends = [iteration.ended_s - zero for iteration in run.iterations]
    step = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 10**9) if len(ends) <= 8 * step)
    marks = [0, *range(step, len(ends) + 1, step)]
    names = [*map(str, marks[:-1]), f"{marks[-1]} iterations"]
    top = axes.secondary_xaxis("top")
    top.set_xticks([ends[mark - 1] if mark else 0.0 for mark in marks], names)
    top.tick_params(colors="#777777", labelsize=8, length=2, pad=1)
    top.spines["top"].set_visible(False)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=INITIATION, label="initiation (prompt)"),
        Patch(color=INCREMENTS[0], label="increments (one token an iteration; shades tell requests apart)"),
        Patch(facecolor=EMPTY, edgecolor="#cfcfcf", hatch="////", label="empty place"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9, labelcolor=_INK)
