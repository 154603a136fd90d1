"""Entry point: commands, exit status, and errors as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

import typer

from deployment.cli.bench import app as bench
from deployment.cli.check import check
from deployment.cli.prompting import chat, generate
from deployment.cli.status import status
from deployment.cli.stopping import leave
from deployment.cli.up import up
from orca_core.errors import ConfigError, InvalidRequestError, OrcaError

EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2
_TYPER_INTERRUPTED: Final = 130
"""What typer makes of Ctrl-C."""

app = typer.Typer(
    name="orca-serve",
    help="Serve a language model from many replicas: gRPC streaming and the OpenAI HTTP API.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (up, generate, chat, status, check):
    app.command()(command)
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"orca-serve {version('orca-serve')}")
        except PackageNotFoundError:
            typer.echo("orca-serve (not installed)")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 done, 1 failed at run time, 2 unusable arguments or config."""
    status = _run(arguments)
    if arguments is None and "ray" in sys.modules and sys.modules["ray"].is_initialized():
        leave(status)  # a start that failed, and has ended its Ray already
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        outcome = app(args=given, prog_name="orca-serve", standalone_mode=False)
        if outcome == _TYPER_INTERRUPTED:
            return _fail("interrupted", EXIT_FAILED)
        return outcome if isinstance(outcome, int) else 0
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            return EXIT_UNUSABLE
        return _fail(error.format_message(), EXIT_UNUSABLE)
    except OrcaError as error:
        return _explain(error)
    except ModuleNotFoundError as error:  # of the client alone, `up` and `check` cannot run
        if error.name is None or error.name.partition(".")[0] in ("deployment", "orca_core"):
            raise
        extra = "bench" if error.name.startswith("matplotlib") else "serve"
        return _fail(f"{error.name} is not installed; this needs: pip install 'orca-serve[{extra}]'", EXIT_FAILED)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_FAILED)
    except BrokenPipeError:
        # the reader of our output has left; nothing more may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _explain(error: OrcaError) -> int:
    """One line a problem."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _fail(str(problem), EXIT_UNUSABLE)
        return EXIT_UNUSABLE
    return _fail(str(error), EXIT_UNUSABLE if isinstance(error, InvalidRequestError) else EXIT_FAILED)


def _fail(message: str, status: int) -> int:
    typer.echo(f"orca-serve: {' '.join(message.split())}", err=True)
    return status
