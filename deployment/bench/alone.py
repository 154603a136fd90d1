"""``python -m deployment.bench.alone``: an engine in a process of its own, without any service around it."""

from __future__ import annotations

import time
from typing import Any

from deployment.bench.helpers import answer_lines
from deployment.bench.wire import prompt_of
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.types import SamplingParams


class Alone:
    """Answers by generating; the engine is loaded with the first question."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def __call__(self, config: dict[str, Any], streams: int, tokens: int) -> dict[str, Any]:
        """The requests that ``deployment.bench.load`` sends, all at once. ``elapsed_s``: of ``Engine.generate``."""
        if self._engine is None:
            self._engine = Engine(EngineConfig(**config)).start()
        prompts = [prompt_of(index) for index in range(streams)]
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        started = time.monotonic()
        results = self._engine.generate(prompts, sampling)
        elapsed_s = time.monotonic() - started
        return {"elapsed_s": elapsed_s, "tokens": sum(len(result.token_ids) for result in results)}

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()


if __name__ == "__main__":
    alone = Alone()
    try:
        answer_lines(alone)
    finally:
        alone.close()
