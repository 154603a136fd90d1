"""``orca-serve bench perplexity`` and ``accuracy``: what a model loses to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, get_args

import typer

from orca_core.config import EMBEDDED_MODEL, Dtype, Quantization
from orca_core.errors import ConfigError


def perplexity(
    quantization: Annotated[str, typer.Option(help="Of the weights, with commas.")] = "none,int8,int4",
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A text file; a chapter of a novel "
                                                                                "otherwise.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are read in one go; the next begin anew.")] = 256,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="What is computed in.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; torch decides otherwise.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
) -> None:  # fmt: skip
    """What quantised weights cost a model on this CPU: how well it foresees a text."""
    names = quantizations(quantization)
    import torch
    from rich.console import Console

    from deployment.bench.perplexity import TEXT, measure_perplexity, perplexity_table, windows
    from orca_core.cpu import choose_compute
    from orca_core.models import load_model
    from orca_core.source import resolve_source
    from orca_core.tokenizer import Tokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    source = resolve_source(model)
    pieces = windows(Tokenizer.load(source).encode((text or TEXT).read_text()), window)
    if not pieces:
        raise ConfigError("--text", "has fewer than two tokens")
    found = []
    for name in names:
        loaded = load_model(source, dtype=dtype, device=torch.device("cpu"), quantization=name)
        compute = choose_compute(loaded)
        found.append(measure_perplexity(compute.decoder, compute.attention, pieces, name))
    Console(highlight=False).print(perplexity_table(found))
    if json_file is not None:
        record = {"model": model, "text": str(text or TEXT), "window": window}
        json_file.write_text(json.dumps(record | {"found": [each.record() for each in found]}, indent=1) + "\n")


def accuracy(
    quantization: Annotated[str, typer.Option(help="Of the weights, with commas.")] = "none,int8,int4",
    positions: Annotated[int, typer.Option(min=16, help="Of the text, that are looked at.")] = 2000,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A text file; two chapters of a novel "
                                                                                "otherwise.")] = None,
    model: Annotated[str, typer.Option(help="Embedded name, folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; torch decides otherwise.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the record here.")] = None,
) -> None:  # fmt: skip
    """How far logits in bfloat16 on this CPU lie from those of float32. Status 1: further than they may."""
    names = quantizations(quantization)
    import torch
    from rich.console import Console

    from deployment.bench.accuracy import TEXTS, accuracy_table, load_ours, measure_found, misses, pieces_of
    from orca_core.source import resolve_source
    from orca_core.tokenizer import Tokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    source = resolve_source(model)
    whole = "\n".join(path.read_text() for path in ((text,) if text else TEXTS))
    pieces = pieces_of(Tokenizer.load(source).encode(whole), positions)
    if not pieces:
        raise ConfigError("--text", "has fewer than two tokens")
    found = [measure_found(source, load_ours(source, name), name, pieces) for name in names]
    Console(highlight=False).print(accuracy_table(found))
    missed = misses(found)
    if json_file is not None:
        record = {"model": model, "found": [each.record() for each in found], "missed": missed}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    for line in missed:
        typer.echo(line, err=True)
    if missed:
        raise typer.Exit(1)


def quantizations(text: str) -> list[Quantization]:
    """Names with commas. Raises ``ConfigError``."""
    known: tuple[Quantization, ...] = get_args(Quantization)
    found = [name for part in text.split(",") for name in known if name == part.strip()]
    if len(found) != len(text.split(",")):
        raise ConfigError("--quantization", f"must be some of {', '.join(known)}, with commas")
    return found
