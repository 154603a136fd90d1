"""``orca-serve bench``: measurements on this machine."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deployment.bench.workloads import WorkloadName
from deployment.cli.bench_model import accuracy, perplexity
from deployment.cli.bench_peers import peers
from deployment.cli.bench_plane import front, tax
from deployment.cli.bench_roofline import roofline
from orca_core.config import EMBEDDED_MODEL, Device, Dtype, EngineConfig
from orca_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from deployment.bench.offline import OfflineOptions, Policy
    from deployment.bench.report import Measured

app = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


for command in (accuracy, front, peers, perplexity, roofline, tax):
    app.command()(command)


@app.callback()
def group() -> None:
    """Measure this machine."""
    # as Ctrl-C: what has been measured is written, and what was started ends with the blocks that started it
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command()
def offline(
    workload: Annotated[WorkloadName, typer.Option(help="equal_size: 128 + 128 tokens each; short_long_mix: 32 + 32 "
                                                        "and 512 + 128 in turn.")] = "short_long_mix",
    batch: Annotated[int, typer.Option(min=1, help="Requests in one iteration.")] = 2,
    policy: Annotated[Literal["iteration", "static", "both"], typer.Option(help="Which scheduling to run.")] = "both",
    rounds: Annotated[int, typer.Option(min=1, help="Times each policy runs the workload; medians are shown.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the workload, all there at once.")] = 16,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "auto",
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads on CPU; torch decides otherwise.")] = None,
    clock: Annotated[Literal["wall", "cpu"], typer.Option(help="cpu: this process's time on a CPU, for a shared "
                                                          "machine; needs --threads 1.")] = "wall",
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one iteration.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw the batch here (PNG).")] = None,
) -> None:  # fmt: skip
    """One engine, without a server: iteration-level against request-level scheduling, on one model and its kernels."""
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(option, f"there is no folder {path.parent}")
    if clock == "cpu" and threads != 1:
        raise ConfigError("--clock", "cpu is a clock for one thread: add --threads 1")
    if plot_file is not None:
        import matplotlib  # noqa: F401, ICN001 - missing, it must be missed now and not after the runs
    from rich.console import Console

    from deployment.bench.offline import OfflineOptions, bench_config
    from deployment.bench.report import make_record, tables, warnings

    policies: tuple[Policy, ...] = ("iteration", "static") if policy == "both" else (policy,)
    options = OfflineOptions(workload, requests, policies, rounds, seed, clock)
    config = EngineConfig(model=model, dtype=dtype, device=device, max_batch_size=batch, threads=threads,
                          max_batch_tokens=max(batch_tokens, batch))  # fmt: skip
    console = Console(stderr=True, highlight=False)
    measured = _measure(options, bench_config(config, options.shapes), console)
    record = make_record(measured)
    for table in tables(record):
        typer.echo()
        Console(highlight=False).print(table)
    for warning in warnings(record):
        console.print(f"\n{warning}", style="yellow", markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if plot_file is not None:
        _plot(plot_file, measured)


@app.command()
def gaps(
    budgets: Annotated[str, typer.Option(help="Values of max_batch_tokens, with commas.")] = "32,64,128,256,512",
    streams: Annotated[int, typer.Option(min=1, help="Streams that run beside the long prompt.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="max_model_len: the long prompt almost fills it.")] = 2048,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "auto",
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads on CPU; torch decides otherwise.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
) -> None:
    """The largest gap between two tokens of running streams while a long prompt is initiated, by token budget."""
    try:
        sizes = sorted({int(text) for text in budgets.split(",")})
    except ValueError:
        raise ConfigError("--budgets", "must be integers with commas") from None
    if sizes[0] <= streams:
        raise ConfigError("--budgets", f"must be above the number of streams, {streams}")
    from rich.console import Console

    from deployment.bench.gaps import gaps_config, gaps_table, measure_gaps
    from deployment.bench.machine import describe_machine
    from orca_core.loader import load_engine_model

    config = gaps_config(
        EngineConfig(model=model, dtype=dtype, device=device, threads=threads, max_batch_tokens=max(sizes)),
        streams, sizes[0], length,
    )  # fmt: skip
    console = Console(stderr=True, highlight=False)
    console.print(f"loading {model}", markup=False)
    loaded = load_engine_model(config)
    if loaded.info.max_model_len < length:
        console.print(f"{model} takes {loaded.info.max_model_len} tokens: the long prompt is made for them, not for "
                      f"{length}", style="yellow", markup=False)  # fmt: skip
    found = []
    for number, size in enumerate(sizes, 1):
        console.print(f"{number} of {len(sizes)}, max_batch_tokens {size}", markup=False)
        found.append(measure_gaps(config, loaded, streams, size))
    Console(highlight=False).print(gaps_table(found, streams))
    if json_file is not None:
        record = {"machine": describe_machine(), "streams": streams, "gaps": [each.record() for each in found]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


@app.command()
def exactness(
    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens each of them generates.")] = 64,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "auto",
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
) -> None:
    """How often greedy tokens differ by batch, pieces, cached prefix and resumption: rounding, made visible."""
    from rich.console import Console

    from deployment.bench.exactness import exactness_table, measure_exactness
    from orca_core.loader import load_engine_model

    batch = 16
    config = EngineConfig(
        model=model, dtype=dtype, device=device, max_batch_size=batch, n_slots=batch * (128 + new_tokens)
    )
    console = Console(stderr=True, highlight=False)
    console.print(f"loading {model}", markup=False)
    loaded = load_engine_model(config)
    found = measure_exactness(config, loaded, requests, new_tokens, lambda text: console.print(text, markup=False))
    Console(highlight=False).print(exactness_table(found, loaded.info.dtype))
    if json_file is not None:
        record = {"dtype": loaded.info.dtype, "circumstances": [each.record() for each in found]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def _measure(options: OfflineOptions, config: EngineConfig, console: Console) -> Measured:
    """Load the model, run everything, say how far it is."""
    from deployment.bench.machine import describe_machine
    from deployment.bench.offline import run_all
    from deployment.bench.report import Measured
    from orca_core.loader import load_engine_model

    console.print(f"loading {config.model}", markup=False)
    model = load_engine_model(config)
    with _progress(options, console) as watch:
        runs = run_all(config, model, options, watch)
    return Measured(options, config, model.info, describe_machine(), runs)


@contextmanager
def _progress(options: OfflineOptions, console: Console) -> Iterator[Callable[[Policy, int], Callable[[], object]]]:
    """A bar over the requests of all runs on a terminal; one line a run elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    # drawn twice a second: more would take time from the engine
    bar = Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=options.n_runs * options.n_requests)

        def watch(policy: Policy, number: int) -> Callable[[], object]:
            text = f"round {number + 1} of {options.rounds}, {policy}"
            bar.update(task, description=text)
            if not console.is_terminal:
                console.print(text, markup=False)
            return lambda: bar.advance(task)

        yield watch


def _plot(path: Path, measured: Measured) -> None:
    """Draw the first round."""
    from deployment.bench.plot import draw

    options, info = measured.options, measured.info
    first: list[Any] = [run for run in measured.runs if run.round == 0]
    caption = f"{options.workload}, {options.n_requests} requests, batch {measured.config.max_batch_size}"
    draw(path, first, f"{caption}: {info.model_id}, {info.dtype}")
