"""The ingress: what both faces call. Request ids, deadlines, tokens, validation, and the way to a replica and back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final

from deployment.accounting import OpenRequest, RequestBooks
from deployment.auth import CountedKeys, KeyCheck, NoKeys
from deployment.broadcast import best_outcome
from deployment.client_ids import handle_of
from deployment.config import AppConfig
from deployment.errors import as_orca_error
from deployment.grpc_api import GrpcMethods
from deployment.links import Heard
from deployment.live import Alarm, LiveRequest, LiveRequests
from deployment.metrics import Registry
from deployment.overview import NOTHING_AROUND, Around, Overview, unknown_model
from deployment.peers import IngressShare
from deployment.preparation import IngressTokenizer, Preparation
from deployment.quota import Quota
from deployment.replica_set import ReplicaSet
from deployment.resuming import ResumingStream
from deployment.serving import GenerationCall, ServedChunk, ServiceStatus
from deployment.together import check_together
from deployment.wiring import dispatcher_of, stream_settings_of
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OrcaError,
    RequestCancelledError,
    UnavailableError,
)
from orca_core.types import CancelOutcome, GenerationRequest, ModelInfo
from orca_core.validation import make_request

DRAINING_RETRY_S: Final = 5.0
"""When to try again after a refusal while draining: another instance may have taken over by then."""

REPORTS_FRESH_S: Final = 0.5
"""Seconds for which the replicas' last answers are good enough for a readiness probe."""


class Ingress(GrpcMethods):
    """Implements ``deployment.serving.Service``. A plain class: the replicas, tokenizer and clock come in from outside.

    ``clock``: seconds, monotonic. ``around``: the other ingresses and the autoscaler.
    """

    def __init__(
        self,
        config: AppConfig,
        replicas: ReplicaSet,
        tokenizer: IngressTokenizer,
        clock: Callable[[], float] = time.monotonic,
        keys: KeyCheck | None = None,
        registry: Registry | None = None,
        around: Around = NOTHING_AROUND,
    ) -> None:
        self._peers = around.peers
        self._config = config
        self._limits = config.limits
        self._replicas = replicas
        self._books = RequestBooks(clock, registry)
        self.keys = CountedKeys(keys or NoKeys(), self._books.refuse)
        self._dispatcher = dispatcher_of(config, replicas, clock, self._books.metrics)
        self._overview = Overview(self._dispatcher, self._books.counters, around, config.ingress.replicas)
        self._stream_settings = stream_settings_of(config)
        self._preparation = Preparation(config, tokenizer)
        self._quota = Quota(config.limits.max_slots_per_key)
        self._clock = clock
        self._live = LiveRequests()
        self._draining = False

    def start(self) -> None:
        """Begin to watch over the replicas; until then they are asked when somebody wants to know."""
        self._dispatcher.start()

    def close(self) -> None:
        """End the tokenizer threads, and all that is open on the replicas."""
        self._preparation.close()
        self._dispatcher.close()

    # ---- the end of the service

    async def drain(self) -> int:
        """Refuse what comes from now on with ``UnavailableError``; returns how many requests are still open.

        With none, the replicas are let go: they would wait for the end of our links before they exit.
        """
        self._draining = True
        if not len(self._live):
            self._dispatcher.end_links()
        return len(self._live)

    async def end_open(self) -> None:
        """The time to drain is over: whatever is open ends with ``UnavailableError``, never as if it were finished."""
        for live in self._live:
            live.end(UnavailableError("the service shut down before the request ended"))
        self._dispatcher.end_links()

    # ---- Service

    async def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        """See ``Service.generate``."""
        live = self._new_live(call)
        self._live.arrive(live)
        entry = self._books.open(call.api)
        held = ExitStack()  # closed once: at the end, or when the deadline is over and the reader takes nothing
        held.callback(entry.close)
        held.callback(self._live.depart, live)
        try:
            request = await self._prepare(call, live)
            held.enter_context(self._quota.hold(len(request.token_ids), request.max_new_tokens))
            with self._running(request, call, live, lambda: _give_up(live, entry, held)) as stream:
                async for served in stream:
                    if live.is_closed and live.verdict is not None:
                        raise live.verdict
                    entry.chunk(served.chunk)
                    yield served
        except (asyncio.CancelledError, GeneratorExit):  # the client is gone: while it waited, or between two chunks
            if live.is_at_deadline(self._clock()):
                entry.expire()  # it keeps its own deadline and hangs up when that passes
            raise
        except Exception as error:
            shown = self._explain(error, live)
            if not live.is_closed:
                entry.fail(shown)
            raise shown from None
        finally:
            held.close()

    async def check(self, calls: list[GenerationCall]) -> None:
        """See ``Service.check``."""
        demands = []
        for call in calls:
            live = self._new_live(call)
            try:
                demands.append((await self._prepare(call, live)).total_tokens)
            except Exception as error:
                shown = self._explain(error, live)
                self._books.refuse(shown)
                raise shown from None
        reports, max_batch_size = self._dispatcher.heard.reports, self._config.engine.max_batch_size
        try:
            check_together(demands, reports, self._limits, max_batch_size, self._quota.largest())
        except InvalidRequestError as error:
            self._books.refuse(error)
            raise

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """See ``Service.cancel``. It may run anywhere, started by another ingress, or wait in that one's line."""
        handle = handle_of(client_request_id)
        known_here = handle in self._live
        asked: list[Awaitable[CancelOutcome]] = [self._replicas.cancel(handle)]
        if self._peers is not None:
            asked.append(self._peers.cancel(handle))
        outcomes = [*await asyncio.gather(*asked), await self.cancel_here(handle)]
        return CancelOutcome.CANCELLED if known_here else best_outcome(outcomes)

    async def cancel_here(self, handle: str) -> CancelOutcome:
        """Cancel what of a handle (``client_ids.handle_of``) is in this ingress, wherever it is."""
        return self._live.cancel(handle)

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """See ``Service.tokenize``."""
        self._preparation.check_model(model)
        return await self._preparation.encode(text)

    async def detokenize(self, token_ids: tuple[int, ...], model: str = "") -> str:
        """See ``Service.detokenize``."""
        self._preparation.check_model(model)
        vocab_size = (await self.model()).vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in token_ids):
            raise InvalidRequestError("token_ids", f"token ids must be integers from 0 to {vocab_size - 1}")
        return await self._preparation.decode(token_ids)

    async def model(self) -> ModelInfo:
        """See ``Service.model``. Raises ``UnavailableError`` until the first replica is up, and asks for one."""
        if self._model is None:
            await self._hear(0.0)
        if (model := self._model) is None:
            self._dispatcher.waker.wake()
            raise self._dispatcher.waker.no_replica()
        return model

    async def status(self) -> ServiceStatus:
        """See ``Service.status``."""
        heard, others = await asyncio.gather(self._hear(0.0), self._overview.ask())
        model = self._model or unknown_model(self._config.model.id)  # whoever only looks has nothing started
        return self._overview.status(model, heard, others, self._draining)

    async def share(self) -> IngressShare:
        """What this ingress has of the service, for another one that is asked for the status."""
        return self._overview.share(self._draining)

    async def ready(self) -> bool:
        """See ``Service.ready``."""
        heard = await self._hear(REPORTS_FRESH_S)
        may_wait = self._model is not None and self._dispatcher.waker.may_wait
        return not self._draining and (any(report.well for report in heard.reports) or may_wait)

    # ---- one request

    def _new_live(self, call: GenerationCall) -> LiveRequest:
        request_id = uuid.uuid4().hex
        limit_s = self._limits.max_request_seconds
        timeout_s = limit_s if call.timeout_s is None else min(call.timeout_s, limit_s)
        visible_id = call.client_request_id or request_id
        handle, has_deadline = handle_of(visible_id), call.timeout_s is not None
        return LiveRequest(request_id, visible_id, handle, timeout_s, self._clock(), has_deadline)

    async def _prepare(self, call: GenerationCall, live: LiveRequest) -> GenerationRequest:
        """From what the client wants to a request that cannot be wrong."""
        if self._draining:
            raise UnavailableError("the service is draining", DRAINING_RETRY_S)
        self._preparation.check(call)
        info = await self.model()
        token_ids = await self._preparation.token_ids(call)
        remaining_s = live.deadline - self._clock()
        if remaining_s <= 0:
            raise DeadlineExceededError(live.timeout_s)
        return make_request(live.request_id, token_ids, call.sampling, info, remaining_s)

    @contextmanager
    def _running(
        self, request: GenerationRequest, call: GenerationCall, live: LiveRequest, on_stall: Callable[[], None]
    ) -> Iterator[ResumingStream]:
        """The request on its way to a replica. Its stream ends with a finish reason or an error, never without."""
        if live.verdict is not None:
            raise live.verdict
        stream = live.stream = ResumingStream(
            request,
            live.visible_id,
            self._dispatcher,
            self._stream_settings,
            self._clock,
            on_resume=self._books.resume,
            arrived_at=live.arrived_at,
            deadline=live.deadline,
            session_id=call.session_id,
            handle=live.handle,
        )
        alarm = Alarm(live, stream, self._clock, on_stall)
        try:
            stream.open()
            yield stream
        finally:
            alarm.cancel()
            stream.cancel()

    def _explain(self, error: BaseException, live: LiveRequest) -> OrcaError:
        """The error as the client sees it: what we did to the stream ourselves counts more than what came of it."""
        if live.verdict is not None:
            return live.verdict
        shown = as_orca_error(error, live.visible_id)
        if isinstance(shown, DeadlineExceededError):
            return DeadlineExceededError(live.timeout_s)
        if isinstance(shown, RequestCancelledError):  # by another ingress: the core knows only our id
            return RequestCancelledError(live.visible_id, shown.reason)
        return shown

    # ---- the replicas

    async def _hear(self, fresh_s: float) -> Heard:
        """What the replicas say of themselves; the last answers where they are at most ``fresh_s`` seconds old."""
        heard = self._dispatcher.heard
        if self._clock() - heard.at > fresh_s or fresh_s == 0:
            heard = await self._dispatcher.poll()
        return heard

    @property
    def _model(self) -> ModelInfo | None:
        """The served model under the name that clients use; ``None`` until a replica has answered anybody here."""
        served = self._dispatcher.served_model
        return None if served is None else replace(served, model_id=self._config.model.id)


def _give_up(live: LiveRequest, entry: OpenRequest, held: ExitStack) -> None:
    """The deadline is over and the reader takes nothing: count the request and give back what it holds."""
    live.is_closed = True
    entry.expire()
    held.close()
