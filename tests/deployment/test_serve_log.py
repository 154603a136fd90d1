"""The log of an ingress: clients that leave are no errors, everything else is still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.grpc_util import get_grpc_response_status

from deployment.serve_log import leave_out_departures


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger(SERVE_LOGGER_NAME)
    before, level, propagate = list(logger.filters), logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    leave_out_departures()
    leave_out_departures()
    assert len(logger.filters) == len(before) + 1
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.filters[:], logger.propagate = before, propagate
    logger.setLevel(level)


def serve_logs(error: BaseException) -> None:
    """As Serve does when a call ends without an answer: at its gRPC face, and for some errors around the call too."""
    try:
        raise error
    except BaseException as caught:
        get_grpc_response_status(caught, None, "request")
        if isinstance(caught, asyncio.CancelledError):
            logging.getLogger(SERVE_LOGGER_NAME).exception("Request failed.")


@pytest.mark.parametrize("error", [GeneratorExit(), asyncio.CancelledError()])
def test_a_client_that_leaves_is_no_error(error: BaseException, logged: pytest.LogCaptureFixture) -> None:
    serve_logs(error)
    assert logged.records == []


def test_what_fails_is_logged_with_its_stack(logged: pytest.LogCaptureFixture) -> None:
    serve_logs(ZeroDivisionError())
    logging.getLogger(SERVE_LOGGER_NAME).info("a line without a stack")
    failure, line = logged.records
    assert (failure.levelname, failure.exc_info is not None) == ("ERROR", True)
    assert line.getMessage() == "a line without a stack"
