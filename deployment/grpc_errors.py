"""Errors on the wire of gRPC: a status with ``google.rpc`` details, and the error that a client makes of it again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from deployment.errors import MAX_MESSAGE_CHARACTERS, ErrorRule, as_orca_error, clip, retry_after_s, rule_of
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OrcaError,
    OverloadedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)

ERROR_DOMAIN: Final = "orca.v1"
"""``domain`` of the ``google.rpc.ErrorInfo`` that carries an error's code and arguments to our own client."""

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
_MAX_ARGUMENT_CHARACTERS: Final = 200
_MAX_ID_CHARACTERS: Final = 256


class GrpcStatus(NamedTuple):
    """What ends an RPC. ``trailing_metadata`` holds a serialised ``google.rpc.Status`` with ErrorInfo, with RetryInfo
    where a delay is known, and with RequestInfo where the request has an id.
    """

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def grpc_status(error: BaseException, request_id: str) -> GrpcStatus:
    """The gRPC status, details and trailing metadata of whatever was raised."""
    shown = as_orca_error(error, request_id)
    rule = rule_of(shown)
    message = clip(str(shown), MAX_MESSAGE_CHARACTERS)
    return GrpcStatus(rule.grpc_code, message, ((STATUS_DETAILS_KEY, _rich_status(shown, rule, message, request_id)),))


def error_from_grpc(code: grpc.StatusCode, details: str, status_bytes: bytes | None) -> OrcaError:
    """The error a server raised, rebuilt on the client: the inverse of ``grpc_status``.

    ``status_bytes``: value of the ``grpc-status-details-bin`` trailer, if any. Statuses that did not come from our
    service (a proxy, the channel itself) become the nearest kind.
    """
    info, delay_s = _read_details(status_bytes)
    if info is not None:
        rebuilt = _rebuild(info, delay_s)
        if rebuilt is not None:
            return rebuilt
    return _nearest(code, details, delay_s)


def _rich_status(error: OrcaError, rule: ErrorRule, message: str, request_id: str) -> bytes:
    """Serialised ``google.rpc.Status``: ErrorInfo (code, arguments), RetryInfo, RequestInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=ERROR_DOMAIN)
    for name, value in zip(_parameters(type(error)), error.args, strict=False):
        info.metadata[name] = clip(str(value), _MAX_ARGUMENT_CHARACTERS)
    status = status_pb2.Status(code=code_pb2.Code.Value(rule.grpc_code.name), message=message)
    status.details.append(_packed(info))
    delay_s = retry_after_s(error)
    if delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(max(0, round(delay_s * 1e9)))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if request_id:
        named = error_details_pb2.RequestInfo(request_id=clip(request_id, _MAX_ID_CHARACTERS))
        status.details.append(_packed(named))
    serialized: bytes = status.SerializeToString()
    return serialized


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _parameters(kind: type[OrcaError]) -> dict[str, str]:
    """Names and annotations (as written) of a constructor's arguments, in order."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: str(p.annotation) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _read_details(status_bytes: bytes | None) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """ErrorInfo of our domain and the retry delay in seconds, each ``None`` where absent or unreadable."""
    found: error_details_pb2.ErrorInfo | None = None
    delay_s: float | None = None
    try:
        details = status_pb2.Status.FromString(status_bytes or b"").details
    except Exception:  # whatever a foreign proxy put there is not ours to judge
        return None, None
    for packed in details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == ERROR_DOMAIN:
            found = info
        elif packed.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return found, delay_s


def _rebuild(info: error_details_pb2.ErrorInfo, delay_s: float | None) -> OrcaError | None:
    """An error of the named kind from its arguments; ``None`` where this version of the client cannot."""
    kind = next((k for k in _subclasses(OrcaError) if k.code == info.reason.lower()), None)
    if kind is None:
        return None
    converters: dict[str, Callable[[str], object]] = {
        "int": int, "float": float, "str": str, "float | None": lambda text: None if text == "None" else float(text),
    }  # fmt: skip
    try:
        arguments = {
            name: converters[annotation](info.metadata[name])
            for name, annotation in _parameters(kind).items()
            if name in info.metadata
        }
        if delay_s is not None:
            arguments["retry_after_s"] = delay_s
        return kind(**arguments)
    except (KeyError, TypeError, ValueError):
        return None


def _subclasses(kind: type[OrcaError]) -> Iterator[type[OrcaError]]:
    """Depth first, children before parents, so that a code that is inherited finds the class that declared it."""
    for child in kind.__subclasses__():
        if "code" in child.__dict__:
            yield child
        yield from _subclasses(child)


def _nearest(code: grpc.StatusCode, details: str, delay_s: float | None) -> OrcaError:
    kinds = grpc.StatusCode
    if code is kinds.INVALID_ARGUMENT:
        return InvalidRequestError("request", details)
    if code is kinds.UNAUTHENTICATED:
        return UnauthenticatedError(details)
    if code is kinds.NOT_FOUND:
        return NotFoundError("resource", details)
    if code is kinds.RESOURCE_EXHAUSTED:
        return OverloadedError(details, delay_s or 1.0)
    if code is kinds.DEADLINE_EXCEEDED:
        return DeadlineExceededError(0.0)
    if code is kinds.CANCELLED:
        return RequestCancelledError("")
    return UnavailableError(f"{code.name}: {details}", delay_s or 1.0)
