"""Where the time of a turn of an engine's loop goes, measured from outside in a run of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orca_core.attention import AttentionBackend, AttentionSpec
from orca_core.batch import Batch
from orca_core.executor import ModelExecutor
from orca_core.kernels import Kernels
from orca_core.kernels.structs import CTimes
from orca_core.kv import KVManager, KVPool
from orca_core.models import AnyDecoder
from orca_core.models.native import NativeDecoder
from orca_core.pool import RequestPool
from orca_core.sampling import SampledToken
from orca_core.scheduler import Scheduler, Selection

PARTS: Final = (
    "linear", "attention", "norm_rope_activation", "sampling", "scheduler", "python", "hand_over", "rest",
)  # fmt: skip
"""What a turn is made of.

- ``linear``: products, the head's included. In the CPU kernels with the bias, SiLU gate and residual they end in.
- ``attention``: of all layers.
- ``norm_rope_activation``: embedding, norms, rotation, K and V into the pool; in torch activation and residual, too.
- ``sampling``: a token for each row. ``scheduler``: the choice of the batch.
- ``python``: the batch's columns, block tables and angles, and the way into the kernels.
- ``hand_over``: what a turn does with its tokens (books, text, chunks, channels), and taking in what has arrived.
- ``rest``: in the native call, but in none of its steps: threads that are asked for and let go.
"""


class Laps:
    """``turns``: seconds by part, one each. What passes between two laps belongs to the part the second one names."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.turns: list[dict[str, float]] = []
        self._clock = clock
        self._last = clock()

    def begin_turn(self) -> None:
        """A turn begins where the scheduler is asked; the one before ends there, with handing over."""
        self.lap("hand_over")
        self.turns.append(dict.fromkeys(PARTS, 0.0))

    def lap(self, part: str) -> None:
        """What has passed since the last lap was for ``part``."""
        before, self._last = self._last, self._clock()
        if self.turns:
            self.turns[-1][part] += self._last - before

    def move(self, source: str, seconds: dict[str, float]) -> None:
        """Part of what was put down to ``source`` is known better."""
        for part, value in seconds.items():
            self.turns[-1][part] += value
            self.turns[-1][source] -= value


def timed_scheduler(laps: Laps) -> type[Scheduler]:
    """The engine's own scheduler, with laps around its choice."""

    class TimedScheduler(Scheduler):
        def select(self, pool: RequestPool, kv: KVManager, now: float) -> Selection:
            laps.begin_turn()
            selection = super().select(pool, kv, now)
            laps.lap("scheduler")
            return selection

    return TimedScheduler


class BenchExecutor(ModelExecutor):
    """The engine's own executor; with ``laps``, it puts down what it does.

    ``feign_initiation``: prompts are not computed, since only increments are looked at and reading K and V takes as
    long whatever they are. Their first token is 0.
    """

    def __init__(
        self, decoder: AnyDecoder, pool: KVPool, attention: AttentionBackend, kernels: Kernels | None,
        laps: Laps | None = None, *, feign_initiation: bool = False,
    ) -> None:  # fmt: skip
        self._laps = laps
        self._feign_initiation = feign_initiation
        attends = attention if laps is None else _TimedAttention(attention, laps)
        super().__init__(decoder, pool, attends, kernels=kernels)

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        """See ``Executor``."""
        if self._feign_initiation and any(span.n_tokens > 1 for span in batch.spans):
            return [SampledToken(0)] * len(batch.sampling_requests)
        sampled = super().run_iteration(batch)
        if self._laps is not None:
            self._laps.lap("sampling")
        return sampled

    def _logits(self, batch: Batch) -> torch.Tensor | None:
        if self._laps is None:
            return super()._logits(batch)
        self._laps.lap("python")
        if isinstance(self._decoder, NativeDecoder):
            return self._native_logits(batch, self._decoder, self._laps)
        with _TimedLinear(self._laps):
            logits = super()._logits(batch)
        self._laps.lap("norm_rope_activation")
        return logits

    def _native_logits(self, batch: Batch, decoder: NativeDecoder, laps: Laps) -> torch.Tensor | None:
        decoder.times = times = CTimes()
        try:
            logits = super()._logits(batch)
        finally:
            decoder.times = None
        laps.lap("python")
        steps = {"linear": times.linear, "attention": times.attention, "norm_rope_activation": times.rows}
        laps.move("python", steps | {"rest": times.all - sum(steps.values())})
        return logits


class _TimedAttention:
    """An ``AttentionBackend`` between two laps."""

    def __init__(self, inner: AttentionBackend, laps: Laps) -> None:
        self._inner = inner
        self._laps = laps

    def prepare(self, batch: Batch) -> None:
        self._inner.prepare(batch)

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        self._laps.lap("norm_rope_activation")
        attended = self._inner.attend(layer, q, pool, batch, spec)
        self._laps.lap("attention")
        return attended


class _TimedLinear(TorchFunctionMode):
    """While it is on, each product of a decoder in torch lies between two laps."""

    def __init__(self, laps: Laps) -> None:
        super().__init__()
        self._laps = laps

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        self._laps.lap("norm_rope_activation")
        made = function(*args, **(kwargs or {}))
        self._laps.lap("linear")
        return made
