"""A benchmark that is told to end writes what it has and ends what it started, whichever signal says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from deployment.cli import bench


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    """Its default action ends the process where it stands: no record, and every engine goes on."""
    ended: list[str] = []
    app = typer.Typer()

    @app.command()
    def measure() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            ended.append("in order")
            raise

    app.callback()(bench.group)
    result = CliRunner().invoke(app, ["measure"])
    assert ended == ["in order"]
    assert result.exit_code != 0
