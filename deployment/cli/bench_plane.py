"""``orca-serve bench front`` and ``bench tax``: they start whole services, one after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployment.cli.up import set_environment
from orca_core.config import EMBEDDED_MODEL
from orca_core.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application
    from rich.console import Console
    from rich.table import Table

    from deployment.bench.front import FrontOptions
    from deployment.config import AppConfig

_PORTS = 2
_FILE_WIDTH = 100  # columns of a table that goes into a file
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")]
PlainProxy = Annotated[bool, typer.Option("--plain-proxy", help="Ray Serve's own proxy in place of HAProxy.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times everything is measured; medians are shown.")]


def front(
    streams: Annotated[str, typer.Option(help="Streams at once, with commas.")] = "1,16,128",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, with commas.")] = "1,2",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 256,
    rounds: Rounds = 3,
    rate: Annotated[float, typer.Option(min=0, help="Tokens/s the engines make together at most; 0: as they can.")] = (
        40_000.0
    ),
    first_tokens: Annotated[int, typer.Option(min=1, help="Requests a round for the first-token latency.")] = 100,
    plain_proxy: PlainProxy = False,
    json_file: JsonFile = None,
) -> None:
    """The serving plane without a model, beside a bare gRPC server and two plain Serve deployments."""
    set_environment(plain_proxy)
    from rich.console import Console

    from deployment.bench.front import FrontOptions, make_record, tables

    options = FrontOptions(
        numbers("--streams", streams), numbers("--replicas", replicas), tokens, rounds, rate, first_tokens, plain_proxy
    )
    console = Console(stderr=True, highlight=False)
    runs = [run for n_replicas in options.replicas for run in _measure_front(options, n_replicas, console)]
    _show(make_record(options, runs), tables, console, json_file)


def tax(
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 128,
    rounds: Rounds = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; all CPUs otherwise.")] = None,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    plain_proxy: PlainProxy = False,
    json_file: JsonFile = None,
) -> None:
    """A real model through the whole service, beside the engine alone with the same threads."""
    set_environment(plain_proxy)
    from rich.console import Console

    from deployment.bench.helpers import Helper
    from deployment.bench.tax import TaxOptions, make_tax_record, measure_tax, tax_arguments, tax_tables

    options = TaxOptions(streams, tokens, rounds, threads or os.cpu_count() or 1, model, plain_proxy)
    console = Console(stderr=True, highlight=False)
    with (
        Helper("deployment.bench.alone", {"OMP_NUM_THREADS": str(options.threads)}) as alone,
        Helper("deployment.bench.load") as load,
        service(tax_arguments(options)) as (address, _),
    ):
        roles = {alone.pid: "engine alone", load.pid: "clients"}
        runs = measure_tax(options, load, alone, address, roles, console.print)
    _show(make_tax_record(options, runs), tax_tables, console, json_file)


def _measure_front(options: FrontOptions, n_replicas: int, console: Console) -> list[dict[str, Any]]:
    from ray import serve

    from deployment.app import application
    from deployment.bench.front import Target, front_arguments, measure
    from deployment.bench.helpers import Helper
    from deployment.bench.paced import paced_replica
    from deployment.bench.plain import plain_application

    token_s = n_replicas / options.rate if options.rate else 0.0
    replica_class = paced_replica(0.0, token_s)
    build = lambda app: application(app, replica_class)  # noqa: E731
    with Helper("deployment.bench.bare") as bare, Helper("deployment.bench.load") as load:
        port = bare.ask()["port"]
        with service(front_arguments(options, n_replicas), build) as (address, name):
            serve.run(plain_application(n_replicas), name="plain", route_prefix="/plain")
            targets = [Target("bare", f"127.0.0.1:{port}"), Target("plain", address, "plain"),
                       Target("orca", address, name)]  # fmt: skip
            roles = {bare.pid: "bare server", load.pid: "clients"}
            return measure(options, n_replicas, load, targets, roles, console.print)


@contextmanager
def service(
    arguments: dict[str, Any], build: Callable[[AppConfig], Application] | None = None
) -> Iterator[tuple[str, str]]:
    """A service of our own on free ports while the block runs; the address of its gRPC face and its name in Serve."""
    from deployment.cli.launcher import Launcher
    from deployment.cli.progress import Progress
    from deployment.haproxy import free_range
    from deployment.serve_document import DEFAULT_HOST
    from deployment.serve_file import load_serve_file, serve_file

    document = load_serve_file("local-cpu").document
    document["applications"][0]["args"] = arguments
    http_port, grpc_port = free_range(_PORTS)
    file = serve_file(document).with_overrides(http_port=http_port, grpc_port=grpc_port)
    launcher = Launcher(file, None, False, build)
    try:
        with Progress() as progress:
            launcher.start(progress)
        yield f"{DEFAULT_HOST}:{grpc_port}", file.app_name
    finally:
        launcher.stop()


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive integers with commas. Raises ``ConfigError``."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(option, "must be positive integers with commas")
    return found


def _show(
    record: dict[str, Any], tables: Callable[[dict[str, Any]], list[Table]], console: Console, json_file: Path | None
) -> None:
    from rich.console import Console as Plain

    from deployment.bench.report import warnings

    for table in tables(record):
        typer.echo()
        Plain(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)
    for warning in warnings(record):
        console.print(f"\n{warning}", style="yellow", markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
