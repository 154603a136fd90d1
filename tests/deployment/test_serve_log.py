"""The log of an ingress: clients that leave are no errors, everything else is still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.grpc_util import get_grpc_response_status
from ray.serve._private.replica import Replica as ServeReplica

from deployment.serve_log import join_serve_log, leave_out_departures, leave_out_housekeeping


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


def serve_notes_call(method: str, error: BaseException | None = None) -> None:
    """As Serve does when a method of a replica's has ended."""
    call = MagicMock(_http_method=None, route="", call_method=method, _client="", request_id="one")
    serve = MagicMock(spec=ServeReplica, _ingress=False, _access_log_context={"serve_access_log": True})
    serve._metrics_manager = MagicMock()
    ServeReplica._record_errors_and_metrics(serve, error, None, 0.2, call)


def test_what_ingress_and_replica_tell_each_other_all_the_time_is_not_logged(logged: pytest.LogCaptureFixture) -> None:
    leave_out_housekeeping()
    leave_out_housekeeping()
    for method in ("report", "drop", "pace", "submit_all"):
        serve_notes_call(method)
    serve_notes_call("report", ZeroDivisionError())
    logging.getLogger(SERVE_LOGGER_NAME).info("CALL report OK says somebody else")
    assert [line.rpartition(" ")[0] for line in logged.messages] == [
        "CALL submit_all OK", "CALL report ERROR", "CALL report OK says somebody",
    ]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Serve's log as its throughput mode makes it: a thousand lines are kept before any is written."""
    path = tmp_path / "replica.log"
    serve, target = logging.getLogger(SERVE_LOGGER_NAME), logging.FileHandler(path)
    handler = MemoryHandler(1000, target=target)
    ours = {name: logging.getLogger(name) for name in ("deployment", "orca_core")}
    before = {name: (logger.level, logger.propagate, list(logger.handlers)) for name, logger in ours.items()}
    level = serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    yield path
    serve.removeHandler(handler)
    serve.setLevel(level)
    for name, logger in ours.items():
        logger.setLevel(before[name][0])
        logger.propagate = before[name][1]
        logger.handlers[:] = before[name][2]
    handler.close()
    target.close()


def test_what_we_log_is_in_the_file_at_once_and_once(file: Path) -> None:
    logging.getLogger(SERVE_LOGGER_NAME).info("began")
    join_serve_log()
    join_serve_log()
    logging.getLogger("deployment.links").warning("replica %s is lost", "a")
    logging.getLogger("orca_core.loader").info("so many slots")
    logging.getLogger("orca_core.loader").debug("too much")
    assert file.read_text().splitlines() == ["began", "replica a is lost", "so many slots"]
    logging.getLogger(SERVE_LOGGER_NAME).info("and what Serve says")
    assert file.read_text().splitlines()[-1] == "and what Serve says"


def test_a_log_that_serve_has_set_up_anew_is_written_too(file: Path) -> None:
    join_serve_log()
    serve = logging.getLogger(SERVE_LOGGER_NAME)
    anew = MemoryHandler(1000, target=logging.FileHandler(file.with_name("anew.log")))
    serve.addHandler(anew)
    logging.getLogger("deployment.links").warning("replica %s is lost", "b")
    assert file.with_name("anew.log").read_text() == "replica b is lost\n"
    serve.removeHandler(anew)
    assert anew.target is not None
    anew.target.close()
    anew.close()
