"""The loop thread's work: receive, select, run, deliver, one step after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orca_core.batch import Batch, BatchBuilder
from orca_core.channel import Outbox, Ticket
from orca_core.chunks import chunk_of
from orca_core.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    InvariantError,
    OrcaError,
    RequestCancelledError,
    UnavailableError,
)
from orca_core.executor import LoadedModel
from orca_core.iterations import IterationObserver, describe_iteration
from orca_core.kv import KVManager
from orca_core.pool import RequestPool
from orca_core.request import Request
from orca_core.sampling import SampledToken
from orca_core.scheduler import Scheduler
from orca_core.stream import TextStream
from orca_core.types import FinishReason, GenerationRequest, Load

logger = logging.getLogger(__name__)

AUDIT_INTERVAL_S = 60.0
"""Seconds between two audits that look at every block: a large pool has 100 000 of them, and somebody may come in."""

MAX_FAILED_ITERATIONS = 3
"""Iterations that may fail one after the other before the engine gives itself up."""


@dataclass(slots=True)
class _Live:
    """What the loop keeps of an unfinished request beside the request itself."""

    request: Request
    ticket: Ticket
    text: TextStream


class EngineLoop:
    """The engine's single-threaded half.

    ``on_end(request_id)`` is called once for every request that ends; ``on_books(load)`` before each hand-over, so that
    nobody hears of an end that the books don't know.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        kv: KVManager,
        *,
        clock: Callable[[], float],
        max_stream_backlog: int,
        on_end: Callable[[str], None],
        on_books: Callable[[Load], None],
        on_iteration: IterationObserver | None = None,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._kv = kv
        self._pool = RequestPool()
        self._builder = BatchBuilder(kv, model.executor.device)
        self._live: dict[str, _Live] = {}
        self._outbox = Outbox()
        self._clock = clock
        self._max_stream_backlog = max_stream_backlog
        self._on_end = on_end
        self._on_books = on_books
        self._on_iteration = on_iteration
        self._eos_ids = frozenset(model.info.eos_ids)
        self._n_iterations = 0
        self._n_failed_in_a_row = 0
        self._n_prompt_tokens = 0
        self._n_generated_tokens = 0
        self._n_cached_prompt_tokens = 0
        self._audited_at: float | None = None

    @property
    def idle(self) -> bool:
        """No unfinished request."""
        return not self._pool

    def load(self) -> Load:
        """Snapshot of the books; slots and counts."""
        return Load(
            n_slots=self._kv.n_slots,
            reserved_slots=self._kv.reserved_slots,
            used_slots=self._kv.used_slots,
            queued_slots=self._pool.queued_slots,
            waiting=self._pool.n_waiting,
            running=self._pool.n_running,
            iterations=self._n_iterations,
            prompt_tokens=self._n_prompt_tokens,
            generated_tokens=self._n_generated_tokens,
            cached_prompt_tokens=self._n_cached_prompt_tokens,
            cached_slots=self._kv.cached_slots,
        )

    # ---- receive

    def receive(self, spec: GenerationRequest, ticket: Ticket, arrived_at: float) -> None:
        """Take a new request into the pool. A failure here ends it alone.

        What a resumed request said elsewhere goes through its text stream again: that restores the bytes and the
        beginnings of stop strings that were held back.
        """
        try:
            request = Request(spec, arrived_at)
            text = TextStream(self._model.tokenizer, spec.sampling, self._eos_ids)
            text.resume(spec.emitted_ids)
            live = _Live(request, ticket, text)
            self._pool.add(request)
        except InvalidRequestError as error:
            self._refuse(ticket, error)
        except BaseException:
            logger.exception("request %s could not be taken in", spec.request_id)
            self._refuse(ticket, InternalError(spec.request_id))
        else:
            self._live[spec.request_id] = live

    def _refuse(self, ticket: Ticket, error: OrcaError) -> None:
        """A request that the pool does not know ends."""
        self._outbox.fail(ticket(), error)
        self._on_end(ticket.request_id)

    def cancel(self, request_id: str, only: Ticket | None = None) -> None:
        """End a request because the client gave up, whatever state it is in. An unknown id is no error.

        ``only``: of the channel that it must write to.
        """
        live = self._live.get(request_id)
        if live is not None and (only is None or only is live.ticket):
            self._fail(live.request, RequestCancelledError(request_id))

    def expire(self) -> None:
        """End the requests whose deadline has passed, waiting or running."""
        for request in self._pool.expired(self._clock()):
            self._fail(request, DeadlineExceededError(request.spec.timeout_s or 0.0))

    def abandon(self, error: UnavailableError, arrivals: Iterable[Ticket] = ()) -> None:
        """End every request: the engine is closing or dead. Everybody is told, however broken the books may be.

        ``arrivals``: requests that were never received.
        """
        for ticket in arrivals:
            self._refuse(ticket, error)
        for live in list(self._live.values()):
            self._outbox.fail(live.ticket(), error)
            try:
                self._retire(live.request)
            except Exception:
                logger.exception("request %s could not be taken off the books", live.request.request_id)
        try:
            self._on_books(self.load())
        except Exception:
            logger.exception("the books could not be closed")
        self._outbox.flush()

    # ---- one iteration

    def run_iteration(self) -> None:
        """One turn (Orca figure 4): select, run, sample, detokenise, emit. Raises when the engine must be given up."""
        self.expire()
        started = self._clock()
        selection = self._scheduler.select(self._pool, self._kv, started)
        for request, error in selection.rejected:
            self._fail(request, error)
        if selection.chosen:
            try:
                batch = self._builder.build(selection.chosen)
                sampled = self._model.executor.run_iteration(batch)
                if len(sampled) != len(batch.sampling_requests):
                    raise InvariantError(f"{len(sampled)} tokens for {len(batch.sampling_requests)} requests")
            except Exception as error:
                self._fail_batch([item.request for item in selection.chosen], error)
            else:
                self._deliver(batch, sampled)
                self._n_iterations += 1
                self._n_failed_in_a_row = 0
                self._show(batch, started)
        self.settle()

    def _show(self, batch: Batch, started: float) -> None:
        """Let the observer see the iteration; what it makes of it is its own affair."""
        if self._on_iteration is not None:
            try:
                self._on_iteration(describe_iteration(batch, started, self._clock()))
            except Exception:
                logger.exception("the observer of iterations failed")

    def settle(self) -> None:
        """Hand over what was said; when nothing is left to do, audit the books. Raises ``InvariantError``."""
        self._hand_over()
        if self._kv.n_holders != self._pool.n_running:  # slots nobody returns would block the line for ever, silently
            raise InvariantError(f"{self._kv.n_holders} requests hold slots, {self._pool.n_running} run")
        if not self.idle:
            return
        self._pool.check_integrity(idle=True)
        self._kv.check_idle()
        now = self._clock()
        if self._audited_at is None or now - self._audited_at >= AUDIT_INTERVAL_S:
            self._kv.check_integrity(idle=True)
            self._audited_at = now

    def _hand_over(self) -> None:
        self._on_books(self.load())
        self._outbox.flush()

    def _fail_batch(self, requests: Sequence[Request], error: Exception) -> None:
        """Its requests end, their slots return, and the loop goes on, or ``error`` is raised: it is to be given up."""
        if not self._model.executor.recover(error):
            raise error
        logger.error("iteration failed, %d requests end with it", len(requests), exc_info=error)
        for request in requests:
            self._kv.distrust(request.request_id)
            self._fail(request, InternalError(request.request_id))
        self._n_failed_in_a_row += 1
        if self._n_failed_in_a_row >= MAX_FAILED_ITERATIONS:
            raise error

    def _deliver(self, batch: Batch, sampled: Sequence[SampledToken]) -> None:
        """Write down what was computed, then give every request that sampled its token."""
        now = self._clock()
        for request, _, n_tokens, _, _, _ in batch.spans:
            is_initiation = request.n_computed < request.n_initial
            request.advance(n_tokens)
            if is_initiation and not request.in_initiation:
                self._count_prompt(request)
        for request, token in zip(batch.sampling_requests, sampled, strict=True):
            try:
                self._emit(request, token, now)
            except BaseException:
                logger.exception("request %s failed while its token was handed on", request.request_id)
                self._fail(request, InternalError(request.request_id))

    def _count_prompt(self, request: Request) -> None:
        """Its initiation is over."""
        if not request.spec.emitted_ids:
            self._n_prompt_tokens += request.n_prompt_tokens
            self._n_cached_prompt_tokens += request.n_cached_prompt_tokens

    def _emit(self, request: Request, token: SampledToken, now: float) -> None:
        """Append, detokenise, look for the end, emit."""
        live = self._live[request.request_id]
        if not token.ok:
            logger.error("request %s: there was nothing sound to choose from", request.request_id)
            self._kv.distrust(request.request_id)
            self._fail(request, InternalError(request.request_id))
            return
        self._kv.publish(request.request_id)
        request.append(token.token_id, now)
        self._n_generated_tokens += 1
        text, finish, stop = live.text.push(token.token_id)
        if finish is None and request.n_output_tokens >= request.spec.max_new_tokens:
            last = live.text.finish()
            text, finish, stop = text + last.text, last.finish or FinishReason.LENGTH, last.stop
        chunk = chunk_of(request, token, text, finish, stop, self._model.tokenizer, now)
        channel = live.ticket()
        if finish is not None:
            self._retire(request)
        if channel is None:  # nobody can read it: see Channel
            self._fail(request, RequestCancelledError(request.request_id))
            return
        self._outbox.put(channel, chunk)
        if finish is None and channel.may_stall and channel.backlog >= self._max_stream_backlog:
            self._drop_stalled(request, channel.backlog + 1)

    def _drop_stalled(self, request: Request, backlog: int) -> None:
        """Its reader is ``backlog`` tokens behind."""
        reason = f"its reader is {backlog} tokens behind, max_stream_backlog is {self._max_stream_backlog}"
        logger.warning("request %s is cancelled: %s", request.request_id, reason)
        self._fail(request, RequestCancelledError(request.request_id, reason))

    # ---- ends

    def _fail(self, request: Request, error: OrcaError) -> None:
        """End a request with an error, in any state. One that has ended already is no error."""
        live = self._live.get(request.request_id)
        if live is not None:
            self._retire(request)
            self._outbox.fail(live.ticket(), error)

    def _retire(self, request: Request) -> None:
        """The one place where a request leaves: slots, pool and books, in the iteration that ended it."""
        self._kv.release(request.request_id)
        self._pool.finish(request)
        del self._live[request.request_id]
        self._on_end(request.request_id)
