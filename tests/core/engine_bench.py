"""An engine over an executor without a model, with all its strings in the test's hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel
from orca_core.iterations import IterationObserver
from orca_core.scheduler import Scheduler
from orca_core.tokenizer import Tokenizer
from orca_core.types import Load, ModelInfo
from tests.core.fakes import VOCAB, FakeExecutor

INFO = ModelInfo("fake", "Fake", "float32", VOCAB, 128, 160, (), False)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with all its strings in the test's hand."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        policy: type[Scheduler] = Scheduler,
        on_iteration: IterationObserver | None = None,
        **config: object,
    ) -> None:
        self.executor = FakeExecutor()
        self.clock = Clock()
        settings = {"max_batch_size": 4, "max_batch_tokens": 32, "block_size": 4, **config}
        self.engine = Engine(
            EngineConfig(**settings),  # type: ignore[arg-type]
            model=LoadedModel(self.executor, tokenizer, INFO),
            clock=self.clock,
            policy=policy,
            on_iteration=on_iteration,
        )

    def wait_for(self, seen: Callable[[Load], bool]) -> Load:
        """Until the books show something; the loop thread is at work meanwhile."""
        for _ in range(2000):
            load = self.engine.load()
            if seen(load):
                return load
            threading.Event().wait(0.005)
        raise AssertionError(f"never seen; the books show {self.engine.load()}")

    def assert_idle(self) -> None:
        load = self.wait_for(lambda load: load.running == load.waiting == 0)
        assert (load.reserved_slots, load.used_slots, load.queued_slots) == (0, 0, 0)
        assert self.engine.load().headroom == INFO.n_slots


def ids_of(channel: object) -> tuple[int, ...]:
    return tuple(token_id for chunk in channel for token_id in chunk.token_ids)  # type: ignore[attr-defined]
