"""The table of errors: complete, the same on both faces, and silent about our insides."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from deployment.errors import ERROR_RULES, as_orca_error, http_error
from deployment.grpc_errors import error_from_grpc, grpc_status
from orca_core import errors
from orca_core.errors import InternalError, OrcaError, RequestCancelledError, UnavailableError
from tests.deployment.fake_service import wrapped

EXAMPLES: list[OrcaError] = [
    errors.InvalidRequestError("temperature", "must be a number"),
    errors.RequestTooLargeError(10, 20, 25, "n_slots"),
    errors.PayloadTooLargeError(10, 5),
    errors.NotFoundError("model", "other"),
    errors.OverloadedError("the line is full", 1.25),
    errors.UnavailableError("draining", 2.0),
    errors.EngineClosedError(),
    errors.EngineClosedError("the engine was not started", None),
    errors.EngineDeadError("RuntimeError"),
    errors.DeadlineExceededError(2.5),
    errors.RequestCancelledError("r1"),
    errors.UnauthenticatedError(),
    errors.InternalError("r1"),
]


def tree(kind: type[OrcaError] = OrcaError) -> Iterator[type[OrcaError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def test_every_code_has_a_row_and_every_row_a_code() -> None:
    own = [kind for kind in tree() if kind.__module__ == "orca_core.errors"]
    assert {kind.code for kind in own} == set(ERROR_RULES)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_survives_grpc_and_pickle(error: OrcaError) -> None:
    status = grpc_status(error, "r1")
    (key, value), *_ = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    rebuilt = error_from_grpc(status.code, status.details, value)
    assert type(rebuilt) is type(error)
    assert (str(rebuilt), rebuilt.args) == (str(error), error.args)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.InvalidRequestError("a", "b"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (errors.RequestTooLargeError(1, 2, 2, "n_slots"), grpc.StatusCode.INVALID_ARGUMENT, 400),
        (errors.PayloadTooLargeError(2, 1), grpc.StatusCode.INVALID_ARGUMENT, 413),
        (errors.UnauthenticatedError(), grpc.StatusCode.UNAUTHENTICATED, 401),
        (errors.NotFoundError("model", "x"), grpc.StatusCode.NOT_FOUND, 404),
        (errors.OverloadedError("full", 1), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (errors.DeadlineExceededError(1), grpc.StatusCode.DEADLINE_EXCEEDED, 408),
        (errors.RequestCancelledError("r"), grpc.StatusCode.CANCELLED, 499),
        (errors.UnavailableError("x"), grpc.StatusCode.UNAVAILABLE, 503),
        (errors.EngineDeadError("x"), grpc.StatusCode.UNAVAILABLE, 503),
        (KeyError("prompt"), grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_statuses(error: Exception, code: grpc.StatusCode, status: int) -> None:
    assert grpc_status(error, "r").code is code
    assert http_error(error, "r").status == status


@pytest.mark.parametrize(("delay_s", "seconds"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30, "30")])
def test_retry_after_is_rounded_up(delay_s: float, seconds: str) -> None:
    error = errors.OverloadedError("full", delay_s)
    assert http_error(error, "r").headers["Retry-After"] == seconds
    status = status_pb2.Status.FromString(grpc_status(error, "r").trailing_metadata[0][1])
    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details].count(True) == 1
    assert retry.retry_delay.ToNanoseconds() == delay_s * 1e9


@pytest.mark.parametrize(
    "error", [RuntimeError("my secret"), errors.InvariantError("my secret"), errors.ModelLoadError("my secret", "x")]
)
def test_insides_stay_inside(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        status, answer = grpc_status(error, "id-1"), http_error(error, "id-1")
    assert status.details == answer.body["error"]["message"] == "internal error, request id-1"
    assert b"secret" not in status.trailing_metadata[0][1]
    assert any(record.levelno == logging.ERROR and "id-1" in record.getMessage() for record in caplog.records)


def test_the_message_of_an_unknown_exception_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("a prompt nobody may read")
    except ValueError as error:
        as_orca_error(error, "id-1")
    assert "nobody may read" not in caplog.text.replace('raise ValueError("a prompt nobody may read")', "")
    assert "builtins.ValueError" in caplog.text
    assert "test_errors.py" in caplog.text


def test_causes_and_lost_actors() -> None:
    assert as_orca_error(wrapped(UnavailableError("x")), "r").args == ("x", 1.0)
    assert isinstance(as_orca_error(asyncio.CancelledError(), "r"), RequestCancelledError)
    lost = type("ActorDiedError", (type("RayActorError", (Exception,), {"__module__": "ray.exceptions"}),), {})
    assert isinstance(as_orca_error(lost(), "r"), UnavailableError)
    impostor = type("RayActorError", (Exception,), {"__module__": "elsewhere"})
    assert isinstance(as_orca_error(impostor(), "r"), InternalError)


def test_long_and_odd_names_fit_in_trailers() -> None:
    status = grpc_status(errors.NotFoundError("model", "é\ud800" * 100_000), "r")
    assert len(status.details) <= 500
    assert len(status.trailing_metadata[0][1]) < 4096


def test_field_names_of_the_face() -> None:
    error = errors.InvalidRequestError("max_new_tokens", "must be an integer")
    shown = http_error(error, "r", {"max_new_tokens": "max_tokens"}).body["error"]
    assert (shown["param"], shown["message"]) == ("max_tokens", "max_tokens: must be an integer")


@pytest.mark.parametrize("status_bytes", [None, b"", b"\xff\xff"])
@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_foreign_statuses_become_the_nearest_kind(code: grpc.StatusCode, status_bytes: bytes | None) -> None:
    error = error_from_grpc(code, "from a proxy", status_bytes)
    assert isinstance(error, OrcaError)
    known = {rule.grpc_code for rule in ERROR_RULES.values()} - {grpc.StatusCode.INTERNAL}
    if code in known:
        assert ERROR_RULES[error.code].grpc_code is code
