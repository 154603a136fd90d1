"""The Orca engine: a thread-safe front over one loop thread, one model and one pool of K/V slots."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Self

from orca_core.admission import Admission
from orca_core.channel import Channel
from orca_core.config import EngineConfig
from orca_core.errors import EngineClosedError, EngineDeadError
from orca_core.executor import LoadedModel
from orca_core.inbox import Inbox
from orca_core.iterations import IterationObserver
from orca_core.kv import KVManager
from orca_core.loader import load_engine_model
from orca_core.loop import EngineLoop
from orca_core.prompts import LONG_TEXT, ChatMessage, Prompt, chat_ids, prompt_ids
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
from orca_core.validation import make_request

logger = logging.getLogger(__name__)


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
        self._inbox = Inbox(clock)

    # ---- life

    def start(self) -> Self:
        """Load the model (minutes for a large one) and start the loop thread. Raises ``ModelLoadError`` and its kin."""
        if self._thread is not None:
            raise EngineClosedError("the engine was started before")
        if self._model is None:
            self._model = load_engine_model(self.config)
        info = self._model.info
        config = self.config
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
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="orca-loop", daemon=True)
        self._thread.start()
        return self

    def close(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, give the open ones ``drain_timeout_s`` seconds, fail the rest. Idempotent."""
        self._inbox.close(drain_timeout_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._loop = None
        self._model = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- requests

    def submit(self, request: GenerationRequest) -> Channel:
        """Hand a validated request to the loop; its chunks come out of the channel.

        Close the channel to cancel. One that is neither read nor closed is taken for a stalled reader.
        Raises ``EngineClosedError``, ``EngineDeadError``, ``OverloadedError`` where too much is waiting already, or
        ``InvalidRequestError`` for a request id that is in use.
        """
        return self._inbox.submit(request)

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Channel]:
        """As ``submit``, but the loop sees all of them before it chooses its next batch. Where it raises, none runs."""
        return self._inbox.submit_all(requests)

    def cancel(self, request_id: str) -> CancelOutcome:
        """Ask for a request to end. It takes effect at the next iteration, whatever state the request is in then."""
        return self._inbox.cancel(request_id)

    def make_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> GenerationRequest:
        """Tokenise (a string) and validate a prompt. Raises ``InvalidRequestError`` and ``RequestTooLargeError``."""
        model = self._running_model()
        ids = prompt_ids(model.tokenizer, prompt)
        return make_request(uuid.uuid4().hex, ids, sampling or SamplingParams(), model.info, timeout_s)

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
        requests = [self.make_request(prompt, params) for prompt, params in pair_up(prompts, sampling)]
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

    def _running_model(self) -> LoadedModel:
        model = self._model
        if model is None or self._thread is None:
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
        for request, channel, arrived_at in arrivals:
            loop.receive(request, channel, arrived_at)
        for request_id, channel_or_none in cancels:
            loop.cancel(request_id, channel_or_none)
        return True

    def _give_up(self, loop: EngineLoop, error: EngineClosedError | EngineDeadError) -> None:
        """Fail whoever is still waiting, so that nobody waits for ever."""
        for request, channel, arrived_at in self._inbox.bury(error):
            loop.receive(request, channel, arrived_at)
        loop.abandon(error)
