"""Tokens per second of one engine on this machine, without a server: one request at a time, then batched.

Prompts are random token ids of a fixed seed and eos is ignored, so that every run does the same work.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orca_core import EMBEDDED_MODEL, Engine, EngineConfig, GenerationResult, SamplingParams


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way to run the same requests. Times in seconds; ``tokens_per_s`` counts output tokens."""

    max_batch_size: int
    requests: int
    total_s: float
    tokens_per_s: float
    mean_ttft_s: float
    mean_tpot_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    options = parse(arguments)
    measurements = [measure(options, size) for size in sorted({1, options.max_batch_size})]
    if options.json:
        print(json.dumps([asdict(measurement) for measurement in measurements], indent=2))
        return
    print(f"{options.model}: {options.requests} requests of {options.prompt_tokens} + {options.new_tokens} tokens")
    print("batch size   tokens/s   total s   mean ttft s   mean tpot s")
    for m in measurements:
        print(f"{m.max_batch_size:10d} {m.tokens_per_s:10.1f} {m.total_s:9.2f}", end=" ")
        print(f"{m.mean_ttft_s:13.3f} {m.mean_tpot_s:13.4f}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None, help="torch threads on CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, max_batch_size: int) -> Measurement:
    """Run all requests through a fresh engine; loading and one request to warm up are not counted."""
    config = EngineConfig(model=options.model, max_batch_size=max_batch_size, threads=options.threads)
    sampling = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    with Engine(config) as engine:
        prompts = random_prompts(options.requests, options.prompt_tokens, engine.info().vocab_size)
        engine.generate(prompts[:1], sampling)
        started = time.perf_counter()
        results = engine.generate(prompts, sampling)
        total_s = time.perf_counter() - started
    return summarize(results, max_batch_size, total_s)


def summarize(results: Sequence[GenerationResult], max_batch_size: int, total_s: float) -> Measurement:
    """Means over the requests. ``total_s``: seconds from the first submission to the last result."""
    n, tokens = len(results), sum(len(result.token_ids) for result in results)
    ttft = sum(result.metrics.ttft_s for result in results) / n
    tpot = sum(result.metrics.tpot_s(len(result.token_ids)) for result in results) / n
    return Measurement(max_batch_size, n, total_s, tokens / total_s, ttft, tpot)


def random_prompts(n: int, length: int, vocab_size: int) -> list[Any]:
    """``n`` lists of ``length`` token ids, the same in every run."""
    chance = random.Random(0)
    return [[chance.randrange(vocab_size) for _ in range(length)] for _ in range(n)]


if __name__ == "__main__":
    main()
