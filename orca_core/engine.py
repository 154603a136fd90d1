"""The Orca engine: a thread-safe front over one loop thread, one model and one pool of K/V slots."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from orca_core.admission import Admission
from orca_core.channel import Channel
from orca_core.config import EngineConfig
from orca_core.errors import EngineClosedError, EngineDeadError, InvalidRequestError
from orca_core.executor import LoadedModel
from orca_core.inbox import Inbox
from orca_core.iterations import IterationObserver
from orca_core.kv import KVManager
from orca_core.loader import load_engine_model
from orca_core.loop import EngineLoop
from orca_core.params import is_number
from orca_core.prompts import LONG_TEXT, ChatMessage, Prompt, chat_ids, named_prompt, prompt_ids
from orca_core.results import collect, pair_up, progress_bar
from orca_core.scheduler import Scheduler
from orca_core.types import (
    CancelOutcome,
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    Health,
    Load,
    ModelInfo,
    SamplingParams,
)
from orca_core.validation import check_request, make_request

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
"""Seconds between two looks at whether a loop that is to end hangs."""


class Engine:
    """Generation with iteration-level scheduling and selective batching (Orca, OSDI 2022).

    ``with Engine(config) as engine`` loads the model, starts the loop thread and closes both. Every method may be
    called from any thread. ``model``: use this instead of loading ``config.model``. ``clock``: seconds, monotonic.
    ``policy``: the scheduler, made with the limits of ``config``. ``on_iteration``: see ``IterationObserver``.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: type[Scheduler] = Scheduler,
        on_iteration: IterationObserver | None = None,
    ) -> None:
        self.config = config
        self._policy = policy
        self._on_iteration = on_iteration
        self._clock = clock
        self._model = model
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._inbox = Inbox(clock)

    # ---- life

    def start(self) -> Self:
        """Load the model (minutes for a large one) and start the loop thread.

        Raises ``ModelLoadError`` and its kin, and ``EngineClosedError`` for a second start, after ``close``, and where
        the system has no thread left.
        """
        if self._thread is not None:
            raise EngineClosedError("the engine was started before")
        self._check_not_closed()
        config = self.config
        if self._model is None:
            self._model = load_engine_model(config)
        self._check_not_closed()  # that took a while
        info = self._model.info
        device_type = self._model.executor.device.type
        kv = KVManager(
            info.n_slots, config.block_size_on(device_type), config.max_batch_size, prefix_cache=config.prefix_cache
        )
        scheduler = self._policy.of(config, device_type)
        self._loop = EngineLoop(
            self._model,
            scheduler,
            kv,
            clock=self._clock,
            max_stream_backlog=config.max_stream_backlog,
            on_end=self._inbox.on_end,
            on_books=self._inbox.on_books,
            on_iteration=self._on_iteration,
        )
        self._inbox.open(
            Admission(self._loop.load(), config.max_batch_size, config.max_waiting_requests, config.max_waiting_slots)
        )
        thread = threading.Thread(target=self._run, args=(self._loop,), name="orca-loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.close()
            raise EngineClosedError(f"the loop thread could not be started: {error}") from error
        self._thread = thread
        return self

    def close(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, give the open ones ``drain_timeout_s`` seconds, fail the rest. Idempotent.

        A loop that hangs (see ``health``) is left behind, and its requests with it.
        Raises ``InvalidRequestError`` where ``drain_timeout_s`` is no number of at least 0.
        """
        if not is_number(drain_timeout_s) or not drain_timeout_s >= 0:
            raise InvalidRequestError("drain_timeout_s", "must be a number of seconds of at least 0")
        self._closed = True
        self._inbox.close(drain_timeout_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._join(self._thread)
        self._loop = None
        self._model = None

    def _join(self, thread: threading.Thread) -> None:
        """Until the loop has ended, or is known to hang: nothing in this process can end it then."""
        while thread.is_alive():
            thread.join(_LOOK_S)
            stalled_s = self._inbox.stalled_s(self.config.progress_timeout_s)
            if thread.is_alive() and stalled_s:
                logger.critical("the engine loop hangs since %.0f s; it is left behind", stalled_s)
                return

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- requests

    def submit(self, request: GenerationRequest) -> Channel:
        """Hand a request to the loop; its chunks come out of the channel.

        Close the channel to cancel, or let go of it; ``with engine.submit(request) as channel`` closes it in any case.
        One that is kept, but not read, is taken for a stalled reader.
        Raises ``EngineClosedError``, ``EngineDeadError``, ``OverloadedError`` where too much is waiting already, or
        ``InvalidRequestError`` and ``RequestTooLargeError`` for what could only fail, or a request id that is in use.
        """
        check_request(request, self._running_model().info)
        return self._inbox.submit(request)

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Channel]:
        """As ``submit``, but the loop sees all of them before it chooses its next batch. Where it raises, none runs."""
        info = self._running_model().info
        if not isinstance(requests, Iterable):
            raise InvalidRequestError("requests", "must be a list of requests")
        together = list(requests)
        for request in together:
            check_request(request, info)
        return self._inbox.submit_all(together)

    def cancel(self, request_id: str) -> CancelOutcome:
        """Ask for a request to end. It takes effect at the next iteration, whatever state the request is in then."""
        if not isinstance(request_id, str):
            raise InvalidRequestError("request_id", "must be a string")
        return self._inbox.cancel(request_id)

    def make_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        emitted_ids: Sequence[int] = (),
    ) -> GenerationRequest:
        """Tokenise (a string) and validate a prompt. Raises ``InvalidRequestError`` and ``RequestTooLargeError``.

        ``emitted_ids``: output tokens of a generation that began elsewhere and goes on here, with the tokens it would
        have had there if ``sampling`` is the same, seed included.
        """
        model = self._running_model()
        ids = prompt_ids(model.tokenizer, prompt)
        params = SamplingParams() if sampling is None else sampling
        return make_request(uuid.uuid4().hex, ids, params, model.info, timeout_s, emitted_ids)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as a prompt of it would have. Raises ``InvalidRequestError``."""
        return self._running_model().tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A prompt of chat messages by the model's own template: ``engine.generate([engine.encode_chat(messages)])``.

        What a message says stays text, even where it spells a special token. Raises ``InvalidRequestError``, also for
        a model without a template.
        """
        return chat_ids(self._running_model().tokenizer, messages)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Run all prompts to their end; results in their order. Blocks; shows a progress bar on a terminal.

        One ``SamplingParams`` for all, or one for each. All prompts are checked before any starts. Raises the first
        request's error; the others are cancelled then.
        """
        requests = []
        for index, (prompt, params) in enumerate(pair_up(prompts, sampling)):
            with named_prompt(index):
                requests.append(self.make_request(prompt, params))
        with progress_bar(len(requests)) as advance:
            return collect(requests, self.submit_all(requests), advance)

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Generate for one prompt, chunk by chunk. Leaving the generator early cancels the request.

        A long text is tokenised in another thread, so that the event loop goes on meanwhile.
        """
        if isinstance(prompt, str) and len(prompt) >= LONG_TEXT:
            request = await asyncio.to_thread(self.make_request, prompt, sampling, timeout_s=timeout_s)
        else:
            request = self.make_request(prompt, sampling, timeout_s=timeout_s)
        channel = self.submit(request)
        try:
            async for chunk in channel:
                yield chunk
        finally:
            channel.close()

    # ---- facts

    def info(self) -> ModelInfo:
        """The loaded model. Raises ``EngineClosedError`` before ``start``."""
        return self._running_model().info

    def load(self) -> Load:
        """Slots and counts as of the last iteration, with what has arrived since counted as queued."""
        return self._inbox.load()

    def health(self) -> Health:
        """Whether the engine makes progress: the loop lives, and work that is pending has seen an iteration lately."""
        health = self._inbox.health(self.config.progress_timeout_s)
        if health.ok and (self._thread is None or not self._thread.is_alive()):
            return Health(False, "the engine is not running")
        return health

    def _check_not_closed(self) -> None:
        if self._closed:
            self._model = None
            raise EngineClosedError("the engine was closed")

    def _running_model(self) -> LoadedModel:
        model = self._model
        if model is None or self._thread is None:
            if self._thread is None and not self._closed:
                raise EngineClosedError("the engine was not started: call start()", None)
            raise EngineClosedError
        return model

    # ---- the loop thread

    def _run(self, loop: EngineLoop) -> None:
        """Body of the loop thread: until closed and drained, or dead."""
        try:
            while self._receive(loop):
                if not loop.idle:
                    loop.run_iteration()
                else:
                    loop.settle()
            self._give_up(loop, EngineClosedError("the engine was closed before the request ended"))
        except BaseException as error:
            logger.critical("the engine loop has died", exc_info=error)
            self._give_up(loop, EngineDeadError(f"the engine loop died with {type(error).__name__}"))

    def _receive(self, loop: EngineLoop) -> bool:
        """Wait until there is something to do and take it in. False: it is time to end."""
        taken = self._inbox.take(lambda: loop.idle)
        if taken is None:
            return False
        arrivals, cancels = taken
        for request, ticket, arrived_at in arrivals:
            loop.receive(request, ticket, arrived_at)
        for request_id, ticket_or_none in cancels:
            loop.cancel(request_id, ticket_or_none)
        return True

    def _give_up(self, loop: EngineLoop, error: EngineClosedError | EngineDeadError) -> None:
        """Fail whoever is still waiting, so that nobody waits for ever."""
        loop.abandon(error, [arrival.ticket for arrival in self._inbox.bury(error)])
