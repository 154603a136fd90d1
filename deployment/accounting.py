"""Each request is counted once, by how it ended, in the totals of ``status`` and in the metrics alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from deployment.metrics import IngressMetrics, Registry, Silent
from orca_core.errors import DeadlineExceededError, OrcaError, RequestCancelledError
from orca_core.types import GenerationChunk

REFUSALS: Final = frozenset(
    {"invalid_request", "request_too_large", "payload_too_large", "not_found", "overloaded", "unavailable",
     "unauthenticated"}
)  # fmt: skip
"""Codes of errors that, before the first token, are a refusal."""


class RequestBooks:
    """The totals of one ingress. ``clock``: seconds, monotonic.

    ``requests`` = the sum of ``requests_stop``, ``_length``, ``_cancelled``, ``_deadline`` and ``_error``, and the
    token totals are the sums of the usages that clients were told.
    """

    def __init__(self, clock: Callable[[], float], registry: Registry | None = None) -> None:
        self.metrics = IngressMetrics(registry or Silent())
        self.counters: Counter[str] = Counter()
        self._clock = clock

    def open(self, api: str) -> OpenRequest:
        """A request has arrived by that API."""
        return OpenRequest(self, api, self._clock)

    def resume(self) -> None:
        """A stream has lost its replica and goes on."""
        self.counters["resumes"] += 1
        self.metrics.failed_over()

    def refuse(self, error: OrcaError) -> None:
        """Count a refusal; other errors are none."""
        if error.code in REFUSALS:
            self.metrics.rejected(error.code)

    def fail(self, error: OrcaError) -> None:
        """Count an error that is neither the client's doing nor a refusal."""
        self.metrics.failed(error.code)


class OpenRequest:
    """One request until ``close``. Whoever goes away without a word has cancelled."""

    def __init__(self, books: RequestBooks, api: str, clock: Callable[[], float]) -> None:
        self._books = books
        self._api = api
        self._clock = clock
        self._arrived_at = clock()
        self._has_begun = False
        self._has_ended = False
        self._outcome = "cancelled"

    def chunk(self, chunk: GenerationChunk) -> None:
        """A chunk is about to be handed on."""
        if not self._has_begun:
            self._has_begun = True
            self._books.metrics.first_token(self._clock() - self._arrived_at)
        if chunk.finish_reason is not None:
            self._has_ended = True
            self._outcome = chunk.finish_reason.value
            self._finish(chunk)

    def _finish(self, chunk: GenerationChunk) -> None:
        usage, timings = chunk.usage, chunk.timings
        if usage is None:
            return
        self._books.counters["prompt_tokens"] += usage.prompt_tokens
        self._books.counters["generated_tokens"] += usage.completion_tokens
        several = timings is not None and usage.completion_tokens > 1
        tpot_s = timings.tpot_s(usage.completion_tokens) if timings is not None and several else None
        self._books.metrics.finished(usage, tpot_s)
        if timings is not None:
            self._books.metrics.queue_time(timings.queue_s)

    def fail(self, error: OrcaError) -> None:
        """It ends with an error, as the client sees it."""
        if isinstance(error, RequestCancelledError):
            self._outcome = "cancelled"
            return
        if isinstance(error, DeadlineExceededError):
            self._outcome = "deadline"
            return
        self._outcome = "error"
        if self._has_begun or error.code not in REFUSALS:
            self._books.fail(error)
        else:
            self._books.refuse(error)

    def expire(self) -> None:
        """The client is gone because its deadline has passed; not where it was told everything before."""
        if not self._has_ended:
            self._outcome = "deadline"

    def close(self) -> None:
        """It has ended."""
        self._books.counters["requests"] += 1
        self._books.counters[f"requests_{self._outcome}"] += 1
        self._books.metrics.ended(self._outcome, self._api, self._clock() - self._arrived_at)
