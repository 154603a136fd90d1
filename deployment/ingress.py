"""The ingress: what both faces call. Request ids, deadlines, tokens, validation, and the way to a replica and back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final

from deployment.accounting import RequestBooks
from deployment.auth import CountedKeys, KeyCheck, NoKeys
from deployment.config import AppConfig
from deployment.errors import as_orca_error
from deployment.grpc_api import GrpcMethods
from deployment.metrics import Registry
from deployment.preparation import IngressTokenizer, Preparation
from deployment.replica import ReplicaReport
from deployment.replica_set import ReplicaSet, ReplicaStream
from deployment.serving import GenerationCall, ReplicaStatus, ServedChunk, ServiceStatus
from orca_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OrcaError,
    RequestCancelledError,
    UnavailableError,
)
from orca_core.types import CancelOutcome, GenerationRequest, ModelInfo
from orca_core.validation import make_request

DEADLINE_GRACE_S: Final = 0.5
"""The engine ends a request at its deadline; if nothing was heard so long after it, the ingress does."""

DRAINING_RETRY_S: Final = 5.0
"""When to try again after a refusal while draining: another instance may have taken over by then."""

REPORTS_FRESH_S: Final = 0.5
"""Seconds for which the replicas' last answers are good enough for a readiness probe."""


@dataclass(slots=True)
class _Live:
    """A request between its arrival and its end. ``visible_id``: the client's own id, or ours where it gave none."""

    request_id: str
    visible_id: str
    timeout_s: float
    deadline: float  # on the ingress's clock
    stream: ReplicaStream | None = None
    verdict: OrcaError | None = None  # why we have ended it ourselves

    @property
    def ended_here(self) -> bool:
        """Whether a ``CancelledError`` comes of the stream we ended, not of the task that reads it."""
        task = asyncio.current_task()
        return self.verdict is not None and not (task is not None and task.cancelling())

    def end(self, verdict: OrcaError) -> None:
        """End it from our side; the first verdict stands."""
        self.verdict = self.verdict or verdict
        if self.stream is not None:
            self.stream.cancel()

    def cancel(self) -> None:
        """``Cancel`` was called for it."""
        self.end(RequestCancelledError(self.visible_id))

    def expire(self) -> None:
        """Its deadline has passed and the engine has not ended it."""
        self.end(DeadlineExceededError(self.timeout_s))


@dataclass(slots=True)
class _Known:
    """What the replicas last said, and when, on the ingress's clock."""

    reports: list[ReplicaReport] = field(default_factory=list)
    at: float = float("-inf")


class Ingress(GrpcMethods):
    """Implements ``deployment.serving.Service``. A plain class: the replicas, tokenizer and clock come in from outside.

    ``clock``: seconds, monotonic.
    """

    def __init__(
        self,
        config: AppConfig,
        replicas: ReplicaSet,
        tokenizer: IngressTokenizer,
        clock: Callable[[], float] = time.monotonic,
        keys: KeyCheck | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._config = config
        self._limits = config.limits
        self._replicas = replicas
        self._preparation = Preparation(config, tokenizer)
        self._clock = clock
        self._live: dict[str, list[_Live]] = {}
        self._books = RequestBooks(clock, registry)
        self.keys = CountedKeys(keys or NoKeys(), self._books.refuse)
        self._known = _Known()
        self._model: ModelInfo | None = None
        self._draining = False

    def close(self) -> None:
        """End the tokenizer thread."""
        self._preparation.close()

    # ---- the end of the service

    async def drain(self) -> int:
        """Refuse what comes from now on with ``UnavailableError``; returns how many requests are still open."""
        self._draining = True
        return sum(len(lives) for lives in self._live.values())

    async def end_open(self) -> None:
        """The time to drain is over: whatever is open ends with ``UnavailableError``, never as if it were finished."""
        for live in [live for lives in self._live.values() for live in lives]:
            live.end(UnavailableError("the service shut down before the request ended"))

    # ---- Service

    async def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        """See ``Service.generate``."""
        live = self._arrive(call)
        entry = self._books.open(call.api)
        try:
            request = await self._prepare(call, live)
            async with aclosing(self._run(request, live)) as stream:
                async for served in stream:
                    entry.chunk(served.chunk)
                    yield served
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not live.ended_here:
                if self._clock() >= live.deadline:
                    entry.expire()  # a gRPC client keeps its own deadline and is gone when it passes
                raise  # the reader went away; otherwise it is what became of the stream we have cancelled ourselves
            shown = self._explain(error, live)
            entry.fail(shown)
            raise shown from None
        finally:
            self._depart(live)
            entry.close()

    async def check(self, calls: list[GenerationCall]) -> None:
        """See ``Service.check``."""
        demand = 0
        for call in calls:
            live = self._new_live(call)
            try:
                demand += (await self._prepare(call, live)).total_tokens
            except Exception as error:
                shown = self._explain(error, live)
                self._books.refuse(shown)
                raise shown from None
        room = sum(report.load.n_slots + self._limits.max_waiting_slots for report in self._known.reports)
        if demand > room:
            reason = f"{len(calls)} choices need {demand} slots together, and all replicas with their lines have {room}"
            refused = InvalidRequestError("n", reason)
            self._books.refuse(refused)
            raise refused

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """See ``Service.cancel``. The replicas know the clients' ids: it may be what another ingress started."""
        here = list(self._live.get(client_request_id, ()))
        outcome = await self._replicas.cancel(client_request_id)
        for live in here:  # those that have not reached a replica yet, or not heard of it
            live.cancel()
        return CancelOutcome.CANCELLED if here else outcome

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
        """See ``Service.model``. Raises ``UnavailableError`` until the first replica is up."""
        if self._model is None:
            await self._hear(0.0)
        if self._model is None:
            raise UnavailableError("no replica is ready yet")
        return self._model

    async def status(self) -> ServiceStatus:
        """See ``Service.status``."""
        known = await self._hear(0.0)
        now = time.time()
        replicas = tuple(
            ReplicaStatus(report.replica, report.load, max(0.0, now - report.taken_at))
            for report in sorted(known.reports, key=lambda report: report.replica)
        )
        counters = dict(self._books.counters)
        return ServiceStatus(await self.model(), replicas, draining=self._draining, counters=counters)

    async def ready(self) -> bool:
        """See ``Service.ready``."""
        return not self._draining and bool((await self._hear(REPORTS_FRESH_S)).reports)

    # ---- one request

    def _arrive(self, call: GenerationCall) -> _Live:
        live = self._new_live(call)
        self._live.setdefault(live.visible_id, []).append(live)
        return live

    def _new_live(self, call: GenerationCall) -> _Live:
        request_id = uuid.uuid4().hex
        limit_s = self._limits.max_request_seconds
        timeout_s = limit_s if call.timeout_s is None else min(call.timeout_s, limit_s)
        return _Live(request_id, call.client_request_id or request_id, timeout_s, self._clock() + timeout_s)

    def _depart(self, live: _Live) -> None:
        others = self._live[live.visible_id]
        others.remove(live)
        if not others:
            del self._live[live.visible_id]

    async def _prepare(self, call: GenerationCall, live: _Live) -> GenerationRequest:
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

    async def _run(self, request: GenerationRequest, live: _Live) -> AsyncGenerator[ServedChunk, None]:
        """Send the request to a replica and relay what comes. Ends with a finish reason or an error, never without."""
        if live.verdict is not None:
            raise live.verdict
        stream = live.stream = self._replicas.stream(request, live.visible_id)
        wait_s = live.deadline - self._clock() + DEADLINE_GRACE_S
        alarm = asyncio.get_running_loop().call_later(wait_s, live.expire)
        finished = False
        try:
            async for replica, chunk in stream:
                finished = chunk.finish_reason is not None
                yield ServedChunk(chunk, live.visible_id, replica)
            if not finished:
                raise UnavailableError("the stream of the replica was lost")
        finally:
            alarm.cancel()
            if not finished:
                stream.cancel()
                self._replicas.abandon(request.request_id)

    def _explain(self, error: BaseException, live: _Live) -> OrcaError:
        """The error as the client sees it: what we did to the stream ourselves counts more than what came of it."""
        if live.verdict is not None:
            return live.verdict
        shown = as_orca_error(error, live.visible_id)
        if isinstance(shown, DeadlineExceededError):
            return DeadlineExceededError(live.timeout_s)
        if isinstance(shown, RequestCancelledError):  # by another ingress: the core knows only our id
            return RequestCancelledError(live.visible_id)
        return shown

    # ---- the replicas

    async def _hear(self, fresh_s: float) -> _Known:
        """What the replicas say of themselves; the last answers where they are at most ``fresh_s`` seconds old."""
        if self._clock() - self._known.at > fresh_s or fresh_s == 0:
            reports = await self._replicas.reports()
            self._known = _Known(reports, self._clock())
            if reports:
                largest = max((report.info for report in reports), key=lambda info: info.n_slots)
                self._model = replace(largest, model_id=self._config.model.id)
        return self._known
