"""The command line run in this process, beside a server of fixed answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployment.cli.main import main
from tests.deployment.grpc_server import FakeIngress, serving


@pytest.fixture
def service() -> FakeIngress:
    return FakeIngress()


@pytest.fixture
def address(service: FakeIngress) -> Iterator[str]:
    with serving(service) as address:
        yield address


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err
