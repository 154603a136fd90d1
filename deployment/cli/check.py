"""``orca-serve check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deployment.cli.preflight import Findings
    from deployment.serve_file import ServeFile


def check(
    config: Annotated[str, typer.Argument(help="A Serve config file, or the name of a packaged one.")],
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="It will run on other machines: look for no files and no memory here.")
    ] = False,
) -> None:
    """Validate a config and say what it would start. Everything that is wrong is said at once."""
    from deployment.cli.machine import read_machine
    from deployment.cli.preflight import Findings, inspect_here
    from deployment.serve_file import load_serve_file

    file = load_serve_file(config)
    with_gpus = file.app.replicas.num_gpus > 0
    findings = Findings() if elsewhere else inspect_here(file.app, read_machine(with_gpus))
    for warning in findings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    findings.raise_problems()
    typer.echo(f"{config}: valid")
    for line in _plan(file, findings):
        typer.echo(line)


def _plan(file: ServeFile, findings: Findings) -> list[str]:
    """What would be started, one line a topic."""
    app, engine = file.app, file.app.engine_config()
    replicas = app.replicas
    span = "" if replicas.min == replicas.max else f" ({replicas.min} to {replicas.max})"
    slots = "measured at start" if engine.n_slots is None else str(engine.n_slots)
    integers = "" if engine.quantization == "none" else f", weights in {engine.quantization}"
    tokens = "by device" if engine.max_batch_tokens is None else str(engine.max_batch_tokens)
    longest = "as the model can" if findings.longest is None else f"up to {findings.longest} tokens, prompt and output"
    return [
        f"model     {app.model.id} from {app.model.source}, dtype {engine.dtype}{integers}",
        f"replicas  {replicas.start}{span} on {engine.device}",
        f"each has  {replicas.num_gpus:g} GPU, {replicas.num_cpus:g} CPU",
        f"engine    batch of {engine.max_batch_size} requests, tokens {tokens}; slots {slots}",
        f"requests  {longest}",
        f"ports     http {file.host}:{file.http_port}, grpc {file.host}:{file.grpc_port}",
    ]
