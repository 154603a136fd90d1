"""The error tree of the engine.

Every error has a stable ``code`` which the edge maps to a gRPC status and an HTTP status (``deployment/errors.py``).

Errors cross process boundaries by pickle. An exception is unpickled as ``cls(*self.args)``, so each constructor hands
*all* of its arguments to ``super().__init__`` and builds its text in ``__str__`` only.

No message ever holds any part of a prompt or of an answer.
"""

from __future__ import annotations

from typing import ClassVar


class OrcaError(Exception):
    """Root of the tree: whatever is raised here on purpose is one of these."""

    code: ClassVar[str] = "internal"


class InvalidRequestError(OrcaError):
    """One field of a request is wrong; the request was not started.

    ``field`` is the public name of the field, ``reason`` a short sentence that is safe to show to the client.
    """

    code = "invalid_request"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class RequestTooLargeError(InvalidRequestError):
    """The demand (prompt + max_new_tokens, in slots) is above what any replica could ever hold."""

    code = "request_too_large"

    def __init__(self, n_prompt_tokens: int, max_new_tokens: int, limit: int, limit_name: str) -> None:
        OrcaError.__init__(self, n_prompt_tokens, max_new_tokens, limit, limit_name)
        self.n_prompt_tokens = n_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.limit = limit
        self.limit_name = limit_name
        self.field = "max_new_tokens"
        self.reason = (
            f"prompt of {n_prompt_tokens} tokens + max_new_tokens {max_new_tokens} = "
            f"{n_prompt_tokens + max_new_tokens} is above {limit_name} {limit}"
        )

    def __str__(self) -> str:
        return self.reason


class PayloadTooLargeError(OrcaError):
    """The request body or prompt text is larger than ``limits.max_prompt_bytes``; it was not parsed."""

    code = "payload_too_large"

    def __init__(self, n_bytes: int, limit: int) -> None:
        super().__init__(n_bytes, limit)
        self.n_bytes = n_bytes
        self.limit = limit

    def __str__(self) -> str:
        return f"request of {self.n_bytes} bytes is above the limit of {self.limit} bytes"


class NotFoundError(OrcaError):
    """What the client named is not here: a model or a request."""

    code = "not_found"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind = kind
        self.name = name

    def __str__(self) -> str:
        return f"unknown {self.kind} {self.name!r}"


class ConfigError(OrcaError):
    """A configuration value is wrong. ``field`` is its dotted name."""

    code = "invalid_config"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """Each thing that is wrong, as an error of its own."""
        return (self,)


class ConfigProblemsError(ConfigError):
    """Several configuration values are wrong. ``field`` and ``reason`` are of the first; ``problems`` are all."""

    def __init__(self, fields: tuple[str, ...], reasons: tuple[str, ...]) -> None:
        OrcaError.__init__(self, fields, reasons)
        self.field = fields[0]
        self.reason = reasons[0]

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """See ``ConfigError.problems``."""
        fields, reasons = self.args
        return tuple(ConfigError(field, reason) for field, reason in zip(fields, reasons, strict=True))


class ModelLoadError(OrcaError):
    """The model could not be loaded from its source."""

    code = "model_load_failed"

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot load model {self.source!r}: {self.reason}"


class UnsupportedArchitectureError(ModelLoadError):
    """The checkpoint names an architecture this project has no decoder for."""

    code = "unsupported_architecture"

    def __init__(self, source: str, architecture: str, known: tuple[str, ...]) -> None:
        OrcaError.__init__(self, source, architecture, known)
        self.source = source
        self.architecture = architecture
        self.known = known
        self.reason = f"architecture {architecture!r} is not supported; known: {', '.join(known)}"


class InsufficientMemoryError(OrcaError):
    """There is too little memory for ``purpose``: the model, or the K and V of even one request. Sizes in bytes."""

    code = "insufficient_memory"

    def __init__(self, device: str, available_bytes: int, needed_bytes: int, purpose: str = "K/V") -> None:
        super().__init__(device, available_bytes, needed_bytes, purpose)
        self.device = device
        self.available_bytes = available_bytes
        self.needed_bytes = needed_bytes
        self.purpose = purpose

    def __str__(self) -> str:
        mib = 1024 * 1024
        return (
            f"{self.device} has {self.available_bytes / mib:.0f} MiB left for {self.purpose} but at least "
            f"{self.needed_bytes / mib:.0f} MiB are needed; free memory or raise memory_utilization"
        )


class OverloadedError(OrcaError):
    """The waiting line is full. ``retry_after_s``: seconds after which a retry makes sense."""

    code = "overloaded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}; retry after {self.retry_after_s:g} s"


class UnavailableError(OrcaError):
    """No replica can take the request now: none ready, draining, or the stream was lost and cannot be resumed.

    ``retry_after_s``: seconds after which a retry makes sense; ``None`` = time alone changes nothing.
    """

    code = "unavailable"

    def __init__(self, reason: str, retry_after_s: float | None = 1.0) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.reason


class DeadlineExceededError(OrcaError):
    """The request's deadline passed. ``timeout_s``: the time it was given, in seconds."""

    code = "deadline_exceeded"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"deadline of {self.timeout_s:g} s exceeded"


class RequestCancelledError(OrcaError):
    """The client gave up, or ``cancel`` was called for the request; or ``reason`` says why the engine did it itself."""

    code = "cancelled"

    def __init__(self, request_id: str, reason: str = "") -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"request {self.request_id} was cancelled" + (f": {self.reason}" if self.reason else "")


class UnauthenticatedError(OrcaError):
    """No API key, or one that is not known."""

    code = "unauthenticated"

    def __init__(self, reason: str = "missing or unknown API key") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class InternalError(OrcaError):
    """Something is broken on our side. The cause is in the log under the request id; the client gets only the id."""

    code = "internal"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"internal error, request {self.request_id}"


class EngineClosedError(UnavailableError):
    """The engine was not started, is closing, or is closed."""

    code = "engine_closed"

    def __init__(self, reason: str = "the engine is not running", retry_after_s: float | None = 1.0) -> None:
        super().__init__(reason, retry_after_s)


class EngineDeadError(UnavailableError):
    """The loop thread has ended with an error; ``reason`` names its kind. The replica must be replaced."""

    code = "engine_dead"


class InvariantError(OrcaError):
    """A ledger does not add up. This is always a bug of ours."""

    code = "invariant_violated"

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"invariant violated: {self.what}"
