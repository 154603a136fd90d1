"""The one table from an error's stable code to its gRPC status, HTTP status and OpenAI error type, and its readers.

An error that is not in the ``OrcaError`` tree, or one that speaks of our own insides, reaches a client as "internal
error" with the request id and nothing else; its kind and its stack go to the log. The message of an unknown exception
is never logged, since it may quote a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc

from orca_core.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OrcaError,
    RequestCancelledError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS: Final = 500
"""A message may quote a name the client sent; gRPC trailers have room for 8 KiB in all."""


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
            _log.error("request %s failed: %s: %s\n%s", loggable(request_id), inner.code, inner, _stack(inner))
        elif inner.request_id != request_id:  # the engine's own name for it, under which its log has the cause
            _log.error("request %s failed: see request %s of a replica", loggable(request_id), inner.request_id)
        return InternalError(request_id)
    if isinstance(inner, asyncio.CancelledError) or _is_ray_error(inner, _RAY_CANCELLED):
        return RequestCancelledError(request_id)
    if _is_ray_error(inner, _RAY_LOST):
        _log.warning("request %s lost its replica: %s", loggable(request_id), type(inner).__name__)
        return UnavailableError("the replica was lost")
    kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
    _log.error("request %s failed: unexpected %s\n%s", loggable(request_id), kind, _stack(inner))
    return InternalError(request_id)


def loggable(request_id: str) -> str:
    """An id that may be a client's, for a line of a log: what could break or forge one is spelled out."""
    plain = request_id.isascii() and request_id.isprintable()
    return clip(request_id if plain else ascii(request_id), MAX_MESSAGE_CHARACTERS)


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
    message = clip(message, MAX_MESSAGE_CHARACTERS)
    return HttpError(
        rule.http_status,
        headers,
        {"error": {"message": message, "type": rule.openai_type, "param": param, "code": code}},
    )


def retry_after_s(error: OrcaError) -> float | None:
    """Seconds after which a retry makes sense; ``None`` where the error does not say."""
    value = getattr(error, "retry_after_s", None)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


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


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, all of which UTF-8 can say."""
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
