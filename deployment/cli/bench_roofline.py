"""``orca-serve bench roofline``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from orca_core.config import EMBEDDED_MODEL, Dtype, Quantization
from orca_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from deployment.bench.roofline_report import Measured

_MEMORY_SHARE: Final = 0.5
"""Part of the memory that is free once the weights are loaded that K and V may take: others want some, too."""


def roofline(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and turns, less memory.")] = False,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "auto",
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = "none",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads on CPU; torch decides otherwise.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw the turns here (PNG).")] = None,
) -> None:
    """How near an engine's turns on this CPU come to what memory and arithmetic allow, and where their time goes."""
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(option, f"there is no folder {path.parent}")
    if plot_file is not None:
        import matplotlib  # noqa: F401, ICN001 - missing, it must be missed now and not after the runs
    import torch
    from rich.console import Console

    from deployment.bench.roofline_report import draw, make_record, tables

    if threads is not None:
        torch.set_num_threads(threads)
    measured = _measure(model, dtype, quantization, Console(stderr=True, highlight=False), quick=quick)
    for table in tables(measured):
        typer.echo()
        Console(highlight=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(make_record(measured), indent=1) + "\n")
    if plot_file is not None:
        draw(plot_file, measured)


def _measure(model: str, dtype: Dtype, quantization: Quantization, console: Console, *, quick: bool) -> Measured:
    """Load the model, measure the ceilings, then all shapes that fit; say how far it is."""
    from deployment.bench.ceilings import measure_ceilings
    from deployment.bench.roofline import Roofline, Subject
    from deployment.bench.roofline_report import Measured
    from deployment.bench.shapes import all_shapes, fitting
    from orca_core.host_memory import read_host_memory

    console.print(f"loading {model}", markup=False)
    subject = Subject.load(model, dtype, quantization)
    decoder = subject.compute.decoder
    n_turns, enough_s = (10, 3.0) if quick else (24, 12.0)
    console.print("ceilings", markup=False)
    ceilings = measure_ceilings((1 if quick else 2) << 29, 5 if quick else 20, decoder.dtype)
    budget = int(_MEMORY_SHARE * read_host_memory().available)
    shapes, left_out = fitting(all_shapes(quick=quick), decoder, n_turns, budget)
    for shape, why in left_out:
        console.print(f"{shape.label} is left out: {why}", style="yellow", markup=False)
    if not shapes:
        raise ConfigError("--model", "takes, or leaves room for, none of the shapes that are measured")
    bench = Roofline(subject, ceilings, shapes, n_turns, enough_s)
    points = []
    for number, shape in enumerate(shapes, 1):
        console.print(f"{number} of {len(shapes)}, {shape.kind} {shape.label}", markup=False)
        points.append(bench.measure(shape))
    return Measured(subject, ceilings, points, left_out)
