"""What the engine's loop itself costs: CPU time of its thread, without a model and beside one.

``python tools/loop_cost.py`` runs iterations without a model; ``--model smollm2-135m-instruct`` those of a model, and
says which share of an iteration is the interpreter's. CPU time of one thread, least and median of all iterations: other
processes hardly change the least one. One JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

from deployment.bench.paced import PacedExecutor
from orca_core.batch import BatchBuilder
from orca_core.channel import Channel
from orca_core.config import EngineConfig
from orca_core.executor import LoadedModel
from orca_core.kernels import Kernels
from orca_core.kv import KVManager
from orca_core.loader import load_engine_model
from orca_core.loop import EngineLoop
from orca_core.scheduler import Scheduler
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.types import GenerationRequest, ModelInfo, SamplingParams

_BLOCK_SIZE = 16
_TOKENIZER = "smollm2-135m-instruct"
_STEPS = {"select": Scheduler, "build": BatchBuilder, "_deliver": EngineLoop, "_show": EngineLoop,
          "_hand_over": EngineLoop}  # fmt: skip


class Timed:
    """CPU time of this thread in functions, in microseconds, by name."""

    def __init__(self) -> None:
        self.us: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.us[name] += (time.thread_time_ns() - started) / 1000

        return timed


def without_model(n_streams: int, n_slots: int) -> LoadedModel:
    """Iterations that take no time, with the embedded model's tokenizer."""
    tokenizer = Tokenizer.load(resolve_source(_TOKENIZER, None))
    info = ModelInfo("none", "none", "none", tokenizer.vocab_size, n_slots // n_streams, n_slots, (), False)
    return LoadedModel(PacedExecutor(0.0), tokenizer, info)


async def run(model: LoadedModel, n_streams: int, n_prompt: int, n_tokens: int) -> list[dict[str, float]]:
    """Microseconds of each iteration in which all streams get a token, by step."""
    timed = Timed()
    loop = EngineLoop(
        model, Scheduler(n_streams, 8192), KVManager(model.info.n_slots, _BLOCK_SIZE, n_streams), clock=time.monotonic,
        max_stream_backlog=10_000, on_end=lambda _: None, on_books=lambda _: None, on_iteration=lambda _: None,
    )  # fmt: skip
    ready: list[Channel] = []
    channels = [Channel(str(i), loop.cancel) for i in range(n_streams)]
    for i, channel in enumerate(channels):
        channel.listen(lambda channel=channel: ready.append(channel))  # type: ignore[misc]
        ids = tuple(1000 + (i * 7919 + j * 104_729) % 5000 for j in range(n_prompt))
        spec = GenerationRequest(str(i), ids, n_tokens, seed=i, sampling=SamplingParams(ignore_eos=True))
        loop.receive(spec, channel.ticket, 0.0)
    iterations: list[dict[str, float]] = []
    patches = [mock.patch.object(of, name, timed.wrap(name, getattr(of, name))) for name, of in _STEPS.items()]
    patches += [mock.patch.object(Kernels, n, timed.wrap(n, getattr(Kernels, n))) for n in ("forward", "sample")]
    executor = mock.patch.object(model.executor, "run_iteration", timed.wrap("executor", model.executor.run_iteration))
    for patch in (*patches, executor):
        patch.start()
    while not loop.idle:
        timed.us.clear()
        wall = time.perf_counter()
        timed.wrap("iteration", loop.run_iteration)()
        wall = 1e6 * (time.perf_counter() - wall)
        started = time.thread_time_ns()
        await _read(ready)
        timed.us["wake and poll"] = (time.thread_time_ns() - started) / 1000
        iterations.append({**timed.us, "wall": wall})
    for patch in (*patches, executor):
        patch.stop()
    return iterations[2:-1]


async def _read(ready: list[Channel]) -> None:
    await asyncio.sleep(0)
    for channel in ready:
        channel.poll()
    ready.clear()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=500, help="generated for each stream")
    parser.add_argument("--model", help="run it; without, iterations take no time")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    n_slots = args.streams * (args.prompt + args.tokens + _BLOCK_SIZE)
    if args.model is None:
        model = without_model(args.streams, n_slots)
    else:
        model = load_engine_model(
            EngineConfig(model=args.model, n_slots=n_slots, max_batch_size=args.streams, threads=args.threads,
                         max_model_len=args.prompt + args.tokens, device="cpu")
        )  # fmt: skip
    seen = asyncio.run(run(model, args.streams, args.prompt, args.tokens))
    native = ("forward", "sample") if args.model else ("executor",)
    for it in seen:
        it["interpreter"] = it["iteration"] - sum(it.get(name, 0.0) for name in native)
    for name in sorted({name for it in seen for name in it}):
        values = [it.get(name, 0.0) for it in seen]
        print(json.dumps({"step": name, "us": round(min(values), 1), "us_median": round(median(values), 1),
                          "us_per_token": round(min(values) / args.streams, 2),
                          "us_per_token_median": round(median(values) / args.streams, 2)}))  # fmt: skip
    share = min(it["interpreter"] for it in seen) / min(it["wall"] for it in seen)
    print(json.dumps({"streams": args.streams, "iterations": len(seen), "interpreter_share": round(share, 4)}))


if __name__ == "__main__":
    main()
