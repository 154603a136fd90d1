"""``orca-serve bench peers``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deployment.bench.peers.settings import DEFAULT_FILE, PRECISIONS, Peer, load_settings
from deployment.bench.peers.works import CLOSED, TRACE, Work
from deployment.cli.bench_plane import numbers
from orca_core.config import EMBEDDED_MODEL
from orca_core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from deployment.bench.peers.engines import Contestant, Setup

_DEFAULT_BATCHES: Final = {
    "increment": (1, 8, 16), "initiation": (1,), "equal_size": (2, 8, 16), "short_long_mix": (2, 8, 16), TRACE: (16,),
}  # fmt: skip
_BATCH_TOKENS: Final = 512
_CLOSED_REQUESTS: Final = 16
_TRACE_REQUESTS: Final = 64
_FILE_WIDTH: Final = 130  # columns of a table that goes into a file


def peers(
    model: Annotated[str, typer.Option(help="Folder of safetensors that all engines read.")] = EMBEDDED_MODEL,
    home: Annotated[Path | None, typer.Option(envvar="PEERS_HOME", help="Where the peers are installed.")] = None,
    config: Annotated[Path, typer.Option(dir_okay=False, help="TOML that names peers and targets.")] = DEFAULT_FILE,
    only: Annotated[str, typer.Option("--peers", help="Names, with commas; all that are here otherwise.")] = "",
    precisions: Annotated[str, typer.Option(help="Of the weights, with commas.")] = ",".join(PRECISIONS),
    workloads: Annotated[str, typer.Option(help="With commas; or trace: through servers.")] = ",".join(CLOSED),
    batches: Annotated[str, typer.Option(help="Requests in one iteration, with commas; initiation is alone.")] = "",
    rates: Annotated[str, typer.Option(help="Requests/s offered in the trace, with commas.")] = "2",
    requests: Annotated[int | None, typer.Option(min=1, help="In a workload; 16, in the trace 64.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each engine runs each workload.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine; all CPUs otherwise.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one iteration of ours; 512, in the trace "
                                                                 "what the product does by itself.")] = None,
    vocab: Annotated[int, typer.Option(min=2, help="Token ids of prompts are below.")] = 32_000,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds an engine has for its start, or for a turn.")] = 600.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start engines anew for every turn: less memory.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
) -> None:  # fmt: skip
    """Ours beside other engines on this machine: same weights and requests, in turns."""
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError("--json", f"there is no folder {json_file.parent}")
    names = chosen("--workloads", workloads, (*CLOSED, TRACE))
    is_trace = TRACE in names
    if is_trace and len(names) > 1:
        raise ConfigError("--workloads", "trace goes through servers: run it by itself")
    works = works_of(names, numbers("--batches", batches) if batches else None,
                     rates_of(rates) if is_trace else (), requests)  # fmt: skip
    from deployment.bench.peers.compare import Comparison, Plan
    from deployment.bench.peers.engines import Setup, choose
    from deployment.bench.peers.tables import make_record

    known, targets = load_settings(config)
    wanted = chosen("--peers", only, tuple(peer.name for peer in known)) if only else None
    if batch_tokens is None and not is_trace:
        batch_tokens = _BATCH_TOKENS
    setup = Setup(model, str(home) if home else "", threads or os.cpu_count() or 1, batch_tokens)
    here, absent = choose(known, setup, wanted, chosen("--precisions", precisions, tuple(PRECISIONS)))
    say = lambda text: typer.echo(text, err=True)  # noqa: E731
    say_who(here, absent, home, model)
    plan = Plan(works, rounds, seed, vocab, timeout, fresh=fresh or is_trace)
    comparison = Comparison(contestants(here, setup, is_trace=is_trace), plan, say)
    try:
        comparison.run()
    finally:  # an interrupted run keeps what it has
        _show(make_record(setup, plan, targets, comparison.runs, comparison.failures, absent), json_file)
    if comparison.failures:
        raise UnavailableError(f"{len(comparison.failures)} turns failed")


def works_of(
    names: Sequence[str], batches: Sequence[int] | None, rates: Sequence[float], n_requests: int | None
) -> tuple[Work, ...]:
    """What to run: at these batch sizes, or those each workload has by itself."""
    found = []
    for name in names:
        sizes = _DEFAULT_BATCHES[name] if batches is None or name == "initiation" else batches
        default = _TRACE_REQUESTS if name == TRACE else _CLOSED_REQUESTS
        for rate in rates if name == TRACE else (0.0,):
            found += [Work(name, batch, n_requests or default, rate) for batch in sizes]
    return tuple(found)


def contestants(peers: Sequence[Peer], setup: Setup, *, is_trace: bool) -> list[Contestant]:
    """Ours in every precision that there is a peer for, or in bf16 where there is none, and the peers."""
    from deployment.bench.peers.engines import ours_alone, ours_served, peer_alone, peer_served
    from deployment.haproxy import free_range

    used = [name for name in PRECISIONS if name in {peer.precision for peer in peers}] or ["bf16"]
    port = lambda: free_range(1)[0]  # noqa: E731
    if is_trace:
        return [*(ours_served(setup, name) for name in used), *(peer_served(setup, peer, port) for peer in peers)]
    return [*(ours_alone(setup, name) for name in used), *(peer_alone(setup, peer, port) for peer in peers)]


def say_who(here: Sequence[Peer], absent: dict[str, list[str]], home: Path | None, model: str) -> None:
    """Which peers there are. Raises ``ConfigError`` where they cannot read the model."""
    for name, missing in absent.items():
        typer.echo(f"not here: {name} (no {', no '.join(missing)})" if home else f"not here: {name}", err=True)
    if not here:
        where = f"in {home}" if home else "anywhere: --home, or PEERS_HOME, says where they are"
        typer.echo(f"there are no peers {where}; this engine runs alone (docs/benchmarks.md)", err=True)
    elif not Path(model).is_dir():
        raise ConfigError("--model", f"{model} is no folder; the peers need one with the same weights")


def chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Names with commas, each once. Raises ``ConfigError`` for one that is not known."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        if name not in known:
            raise ConfigError(option, f"{name!r} is none of {', '.join(known)}")
    return found


def rates_of(text: str) -> tuple[float, ...]:
    """Positive numbers with commas. Raises ``ConfigError``."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise ConfigError("--rates", "must be positive numbers with commas")
    return found


def _show(record: dict[str, Any], json_file: Path | None) -> None:
    from rich.console import Console

    from deployment.bench.peers.tables import tables
    from deployment.bench.report import warnings

    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if not record["runs"]:
        return
    for table in tables(record):
        typer.echo()
        Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)
    for warning in warnings(record):
        typer.echo(f"\n{warning}", err=True)
