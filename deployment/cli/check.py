"""``orca-serve check``."""

from __future__ import annotations

from typing import Annotated

import typer


def check(config: Annotated[str, typer.Argument(help="A Serve config file, or the name of a packaged one.")]) -> None:
    """Validate a config and say what it would start."""
    from deployment.serve_file import load_serve_file

    file = load_serve_file(config)
    app, engine = file.app, file.app.engine_config()
    replicas = app.replicas
    span = "" if replicas.min == replicas.max else f" ({replicas.min} to {replicas.max})"
    slots = "measured at start" if engine.n_slots is None else str(engine.n_slots)
    integers = "" if engine.quantization == "none" else f", weights in {engine.quantization}"
    typer.echo(f"{config}: valid")
    typer.echo(f"model     {app.model.id} from {app.model.source}, dtype {engine.dtype}{integers}")
    typer.echo(f"replicas  {replicas.start}{span} on {engine.device}")
    typer.echo(f"each has  {replicas.num_gpus:g} GPU, {replicas.num_cpus:g} CPU")
    tokens = "by device" if engine.max_batch_tokens is None else str(engine.max_batch_tokens)
    typer.echo(f"engine    batch of {engine.max_batch_size} requests, tokens {tokens}; slots {slots}")
    typer.echo(f"ports     http {file.host}:{file.http_port}, grpc {file.host}:{file.grpc_port}")
