"""The one table from an error's stable code to its gRPC status, HTTP status and OpenAI error type, and its readers.

An error that is not in the ``OrcaError`` tree, or one that speaks of our own insides, reaches a client as "internal
error" with the request id and nothing else; its kind and its stack go to the log. The message of an unknown exception
is never logged, since it may quote a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from orca_core.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OrcaError,
    RequestCancelledError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

ERROR_DOMAIN: Final = "orca.v1"
"""``domain`` of the ``google.rpc.ErrorInfo`` that carries an error's code and arguments to our own client."""

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_MESSAGE_CHARACTERS: Final = 500
"""A message may quote a name the client sent; gRPC trailers have room for 8 KiB in all."""
_MAX_ARGUMENT_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """How one kind of error looks outside. ``opaque``: the client learns the request id and nothing else."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    opaque: bool = False


_INTERNAL: Final = ErrorRule(grpc.StatusCode.INTERNAL, 500, "server_error", opaque=True)
_INVALID: Final = ErrorRule(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error")
_UNAVAILABLE: Final = ErrorRule(grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error")

ERROR_RULES: Final[Mapping[str, ErrorRule]] = {
    "invalid_request": _INVALID,
    "request_too_large": _INVALID,
    "payload_too_large": ErrorRule(grpc.StatusCode.INVALID_ARGUMENT, 413, "invalid_request_error"),
    "unauthenticated": ErrorRule(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    "not_found": ErrorRule(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    "overloaded": ErrorRule(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    "deadline_exceeded": ErrorRule(grpc.StatusCode.DEADLINE_EXCEEDED, 408, "timeout_error"),
    "cancelled": ErrorRule(grpc.StatusCode.CANCELLED, 499, "request_cancelled"),
    "unavailable": _UNAVAILABLE,
    "engine_closed": _UNAVAILABLE,
    "engine_dead": _UNAVAILABLE,
    "internal": _INTERNAL,
    "invariant_violated": _INTERNAL,
    "invalid_config": _INTERNAL,
    "model_load_failed": _INTERNAL,
    "unsupported_architecture": _INTERNAL,
    "insufficient_memory": _INTERNAL,
}
"""Every code of ``orca_core.errors`` has exactly one row (a test says so)."""


class GrpcStatus(NamedTuple):
    """What ends an RPC. ``trailing_metadata`` holds a serialised ``google.rpc.Status`` with ErrorInfo and RetryInfo."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


class HttpError(NamedTuple):
    """An HTTP answer: status, headers to add, and an OpenAI error object as a dict ready for JSON."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


def rule_of(error: OrcaError) -> ErrorRule:
    """The row of an error; a code without one is an internal error."""
    return ERROR_RULES.get(error.code, _INTERNAL)


def as_orca_error(error: BaseException, request_id: str) -> OrcaError:
    """Whatever was raised, as an error that is safe to show to the client of ``request_id``.

    Ray wraps an actor's exception in a ``RayTaskError``: its cause counts. A lost actor becomes ``UnavailableError``, a
    cancelled task ``RequestCancelledError``, everything unknown or opaque ``InternalError`` after its stack was logged.
    """
    inner = _unwrap(error)
    if isinstance(inner, OrcaError):
        if not rule_of(inner).opaque:
            return inner
        if not isinstance(inner, InternalError):
            _log.error("request %s failed: %s: %s\n%s", request_id, inner.code, inner, _stack(inner))
        return InternalError(request_id)
    if isinstance(inner, asyncio.CancelledError) or _is_ray_error(inner, _RAY_CANCELLED):
        return RequestCancelledError(request_id)
    if _is_ray_error(inner, _RAY_LOST):
        _log.warning("request %s lost its replica: %s", request_id, type(inner).__name__)
        return UnavailableError("the replica was lost")
    kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
    _log.error("request %s failed: unexpected %s\n%s", request_id, kind, _stack(inner))
    return InternalError(request_id)


def grpc_status(error: BaseException, request_id: str) -> GrpcStatus:
    """The gRPC status, details and trailing metadata of whatever was raised."""
    shown = as_orca_error(error, request_id)
    rule = rule_of(shown)
    message = _clip(str(shown), MAX_MESSAGE_CHARACTERS)
    return GrpcStatus(rule.grpc_code, message, ((STATUS_DETAILS_KEY, _rich_status(shown, rule, message)),))


def http_error(error: BaseException, request_id: str, field_names: Mapping[str, str] | None = None) -> HttpError:
    """The HTTP status, extra headers and OpenAI error object of whatever was raised.

    ``field_names``: our field name -> the name the HTTP client used, for ``param`` and the message.
    """
    shown = as_orca_error(error, request_id)
    rule = rule_of(shown)
    message, param, code = str(shown), None, shown.code
    if isinstance(shown, InvalidRequestError):
        param = (field_names or {}).get(shown.field, shown.field)
        for ours, theirs in (field_names or {}).items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
    elif isinstance(shown, NotFoundError) and shown.kind == "model":
        param, code = "model", "model_not_found"
    headers = {}
    delay_s = retry_after_s(shown)
    if delay_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(delay_s)))
    if rule.http_status == 408:
        headers["x-should-retry"] = "false"  # OpenAI's clients retry a 408, but this deadline was the client's own
    message = _clip(message, MAX_MESSAGE_CHARACTERS)
    return HttpError(
        rule.http_status,
        headers,
        {"error": {"message": message, "type": rule.openai_type, "param": param, "code": code}},
    )


def retry_after_s(error: OrcaError) -> float | None:
    """Seconds after which a retry makes sense; ``None`` where the error does not say."""
    value = getattr(error, "retry_after_s", None)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


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


_RAY_LOST: Final = frozenset(
    {"RayActorError", "ReplicaUnavailableError", "DeploymentUnavailableError", "BackPressureError", "NodeDiedError",
     "WorkerCrashedError"}
)  # fmt: skip
_RAY_CANCELLED: Final = frozenset({"TaskCancelledError", "RequestCancelledError"})


def _is_ray_error(error: BaseException, names: frozenset[str]) -> bool:
    """Whether a class of the error's MRO is one of Ray's of that name; Ray itself is not imported for it."""
    return any(cls.__name__ in names and cls.__module__.split(".")[0] == "ray" for cls in type(error).__mro__)


def _unwrap(error: BaseException) -> BaseException:
    """Follow ``cause``, where RayTaskError keeps the original; its own class also derives from the original's."""
    for _ in range(8):
        cause = getattr(error, "cause", None)
        if not isinstance(cause, BaseException) or cause is error:
            break
        error = cause
    return error


def _stack(error: BaseException) -> str:
    """Files, lines and source of the stack, without the exception's message."""
    return "".join(traceback.format_tb(error.__traceback__)).rstrip()


def _clip(text: str, limit: int) -> str:
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _rich_status(error: OrcaError, rule: ErrorRule, message: str) -> bytes:
    """Serialised ``google.rpc.Status``: ErrorInfo (code, arguments) and, where a delay is known, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=ERROR_DOMAIN)
    for name, value in zip(_parameters(type(error)), error.args, strict=False):
        info.metadata[name] = _clip(str(value), _MAX_ARGUMENT_CHARACTERS)
    status = status_pb2.Status(code=code_pb2.Code.Value(rule.grpc_code.name), message=message)
    status.details.append(_packed(info))
    delay_s = retry_after_s(error)
    if delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(max(0, round(delay_s * 1e9)))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
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
    converters = {"int": int, "float": float, "str": str}
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
    from orca_core.errors import DeadlineExceededError, OverloadedError, UnauthenticatedError

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
