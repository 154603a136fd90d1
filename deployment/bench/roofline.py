"""How near an iteration on a CPU comes to what the machine allows: the time to read, or to multiply, what it has to.

What is timed are turns of a whole engine, from one choice of a batch to the next: scheduler, batch, model, sampling,
text and hand-over to readers in another thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from deployment.bench.ceilings import Ceilings
from deployment.bench.laps import PARTS, BenchExecutor, Laps, timed_scheduler
from deployment.bench.machine import CpuShares
from deployment.bench.shapes import N_WARM, Point, Shape, floor_s
from orca_core.attention import AttentionBackend
from orca_core.config import Dtype, EngineConfig, Quantization
from orca_core.cpu import Compute, choose_compute
from orca_core.engine import Engine
from orca_core.errors import ModelLoadError
from orca_core.executor import LoadedModel
from orca_core.iterations import Iteration
from orca_core.kernels import Kernels
from orca_core.kv import KVManager, KVPool
from orca_core.models import AnyDecoder, load_model
from orca_core.results import collect
from orca_core.scheduler import Scheduler
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.types import ModelInfo, SamplingParams

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured. ``name``: as it was asked for. ``has_text``: most of its tokens do."""

    name: str
    quantization: Quantization
    compute: Compute
    tokenizer: Tokenizer
    has_text: bool

    @classmethod
    def load(cls, name: str, dtype: Dtype, quantization: Quantization) -> Self:
        """Onto the CPU. A folder without a tokenizer will do: tokens then have no text.

        Raises ``ModelLoadError`` and its kin.
        """
        source = resolve_source(name)
        loaded = load_model(source, dtype=dtype, device=torch.device("cpu"), quantization=quantization)
        try:
            tokenizer = Tokenizer.load(source)
        except ModelLoadError:
            tokenizer = _wordless()
        has_text = 2 * tokenizer.vocab_size >= loaded.config.vocab_size
        return cls(name, quantization, choose_compute(loaded), tokenizer, has_text)

    @property
    def dtype(self) -> str:
        """That it computes in."""
        return str(self.compute.decoder.dtype).removeprefix("torch.")

    def record(self) -> dict[str, Any]:
        """For JSON, at each point."""
        return {"model": self.name, "dtype": self.dtype, "quantization": self.quantization}


class Roofline:
    """Runs an engine over a pool of its own, in which each of ``shapes`` fits.

    ``n_turns``: that are looked at, of each shape, twice: timed alone, and watched. Initiations stop after
    ``enough_s`` seconds, but not before the second.
    """

    def __init__(
        self, subject: Subject, ceilings: Ceilings, shapes: Sequence[Shape], n_turns: int, enough_s: float
    ) -> None:
        self._subject = subject
        self._ceilings = ceilings
        self._n_turns = n_turns
        self._enough_s = enough_s
        self._n_slots = n_slots = max(shape.n_slots(n_turns) for shape in shapes)
        self._max_batch_size = max_batch_size = max(shape.batch for shape in shapes)
        decoder = subject.compute.decoder
        self._pool = KVPool(
            decoder.kv_shape, KVManager.blocks_needed(n_slots, BLOCK_SIZE, max_batch_size), BLOCK_SIZE, decoder.device
        )
        for tensor in (*self._pool.keys, *self._pool.values):
            tensor.copy_(torch.randn(tensor.shape[1:]))  # those of feigned prompts

    def measure(self, shape: Shape) -> Point:
        """Time it, then watch it. Raises ``ValueError`` where no turn had that shape."""
        with CpuShares() as shares:
            timed = self._run(shape, None)
            laps = Laps()
            self._run(shape, laps)
        watched = sorted(laps.turns, key=lambda turn: sum(turn.values()))
        half = watched[: -(-len(watched) // 2)]
        means = {part: statistics.fmean(turn[part] for turn in half) for part in PARTS}
        whole = sum(means.values())
        ms = 1000 * statistics.median(timed)
        read_s, product_s = floor_s(self._subject.compute.decoder, shape, self._ceilings)
        return Point(
            shape, ms, 1000 * min(timed), 1000 * whole, {part: ms * mean / whole for part, mean in means.items()},
            1000 * read_s, 1000 * product_s, len(timed), shares.foreign,
        )  # fmt: skip

    def _run(self, shape: Shape, laps: Laps | None) -> list[float]:
        """Seconds of all turns of that shape that count; of ``laps``, only those are kept."""
        seen: list[Iteration] = []
        executor = BenchExecutor(*self._executor_parts(), laps, feign_initiation=shape.kind == "increment")
        policy = Scheduler if laps is None else timed_scheduler(laps)
        engine = Engine(self._config(shape), model=self._model(executor), policy=policy, on_iteration=seen.append)
        with engine:
            if shape.kind == "increment":
                self._increments(engine, shape)
            else:
                self._initiations(engine, shape)
        counted = [i for i, each in enumerate(seen[:-1]) if shape.is_of(each)][_warm_ups(shape) :]
        if not counted:
            raise ValueError(f"no turn of the engine was {shape}")
        if laps is not None:
            laps.turns = [laps.turns[i] for i in counted]
        return [seen[i + 1].started_s - seen[i].started_s for i in counted]

    def _increments(self, engine: Engine, shape: Shape) -> None:
        """All at once; in the middle of the turns that count, they have ``context`` tokens."""
        n_tokens = self._n_turns + N_WARM + 2  # one of the prompt, one that no turn follows
        n_prompt = max(1, shape.context - N_WARM - (self._n_turns + 1) // 2)
        self._generate(engine, shape.batch, n_prompt, n_tokens)

    def _initiations(self, engine: Engine, shape: Shape) -> None:
        """One after the other. A second token, or there would be no next turn to end the first."""
        started = time.monotonic()
        for done in range(self._n_turns + 1):
            if done > 2 and time.monotonic() - started > self._enough_s:
                return
            self._generate(engine, 1, shape.context, 2)

    def _generate(self, engine: Engine, n_requests: int, n_prompt: int, n_tokens: int) -> None:
        vocab = self._subject.compute.decoder.config.vocab_size
        params = SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)
        prompts = [[(i + 7 * j) % vocab for j in range(n_prompt)] for i in range(n_requests)]
        requests = [engine.make_request(prompt, params) for prompt in prompts]
        collect(requests, engine.submit_all(requests), lambda: None)

    def _executor_parts(self) -> tuple[AnyDecoder, KVPool, AttentionBackend, Kernels | None]:
        decoder, attention, kernels = self._subject.compute
        return decoder, self._pool, attention, kernels

    def _config(self, shape: Shape) -> EngineConfig:
        """Prompts are computed whole."""
        return EngineConfig(
            model=self._subject.name, max_batch_size=self._max_batch_size, n_slots=self._n_slots,
            max_batch_tokens=max(self._max_batch_size, shape.batch * shape.context), block_size=BLOCK_SIZE,
            prefix_cache=False,
        )  # fmt: skip

    def _model(self, executor: BenchExecutor) -> LoadedModel:
        config = self._subject.compute.decoder.config
        info = ModelInfo(
            self._subject.name, config.architecture, self._subject.dtype, config.vocab_size, self._n_slots,
            self._n_slots, (), has_chat_template=False,
        )  # fmt: skip
        return LoadedModel(executor, self._subject.tokenizer, info)


def _wordless() -> Tokenizer:
    """Knows no token of any model."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast  # it has no types
    return Tokenizer(make(tokenizer_object=Backend(models.WordLevel({"?": 0}))))


def _warm_ups(shape: Shape) -> int:
    return N_WARM if shape.kind == "increment" else 1
