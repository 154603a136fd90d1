"""Runs one workload through an engine, once for each policy and round, over one loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from deployment.bench.machine import CpuShares
from deployment.bench.workloads import Shape, WorkloadName, random_prompts, shapes_of
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel
from orca_core.iterations import Iteration
from orca_core.results import collect
from orca_core.scheduler import Scheduler
from orca_core.static_policy import StaticScheduler
from orca_core.types import GenerationResult, SamplingParams

Policy = Literal["iteration", "static"]
Clock = Literal["wall", "cpu"]
SCHEDULERS: Final[dict[str, type[Scheduler]]] = {"iteration": Scheduler, "static": StaticScheduler}
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.monotonic, "cpu": time.process_time}
"""Time of the process on a CPU is right for one thread that never waits, which is what an engine with work is."""
N_WARMUP_REQUESTS: Final = 2
_WARMUP_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """What to run. ``rounds``: how often each policy runs the whole workload.

    ``clock``: ``cpu`` counts only the time this process was on a CPU. On a shared machine that is a fairer clock, for
    one torch thread: it does not run while others do. It still sees what they take of caches and memory bandwidth.
    """

    workload: WorkloadName
    n_requests: int
    policies: tuple[Policy, ...]
    rounds: int
    seed: int
    clock: Clock = "wall"

    @property
    def shapes(self) -> list[Shape]:
        """The requests, in arrival order."""
        return shapes_of(self.workload, self.n_requests)

    @property
    def n_runs(self) -> int:
        """Runs of the workload in all."""
        return self.rounds * len(self.policies)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy through the workload once. Seconds; ``started_s`` and the iterations are on one clock.

    ``results`` in arrival order. ``foreign_cpu``, ``own_cpu``: shares of all CPUs, 0 to 1.
    """

    policy: Policy
    round: int
    started_s: float
    elapsed_s: float
    results: list[GenerationResult]
    iterations: list[Iteration]
    foreign_cpu: float
    own_cpu: float

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(len(result.token_ids) for result in self.results)


def bench_config(config: EngineConfig, shapes: Sequence[Shape]) -> EngineConfig:
    """``config`` with just the slots that a full batch of the longest requests needs, so that none ever waits for one.

    Measuring the free memory and laying out a pool in all of it would take longer and change nothing.
    """
    longest = max(shape.total_tokens for shape in shapes)
    return replace(config, n_slots=config.max_batch_size * longest)


def run_all(
    config: EngineConfig,
    model: LoadedModel,
    options: OfflineOptions,
    watch: Callable[[Policy, int], Callable[[], object]],
) -> list[Run]:
    """All rounds of all policies. ``watch(policy, round)`` returns what is called whenever a request has ended.

    The order of the policies turns with every round, so that a machine that gets slower or faster harms none.
    """
    runs = []
    for number in range(options.rounds):
        for policy in options.policies if number % 2 == 0 else options.policies[::-1]:
            runs.append(run_once(config, model, options, policy, number, watch(policy, number)))
    return runs


def run_once(
    config: EngineConfig,
    model: LoadedModel,
    options: OfflineOptions,
    policy: Policy,
    number: int,
    advance: Callable[[], object],
) -> Run:
    """One policy through the workload, all requests at once, in an engine of its own that was warmed up.

    Prompts differ from round to round and are the same for each policy of a round.
    """
    shapes, clock = options.shapes, CLOCKS[options.clock]
    seen: list[Iteration] = []
    seed = options.seed + 1000 * number
    with Engine(config, model=model, clock=clock, policy=SCHEDULERS[policy], on_iteration=seen.append) as engine:
        vocab_size = model.info.vocab_size
        warmup = random_prompts(shapes[:N_WARMUP_REQUESTS], vocab_size, seed + 1)
        engine.generate(warmup, SamplingParams(max_new_tokens=_WARMUP_TOKENS, ignore_eos=True))
        requests = [
            engine.make_request(prompt, SamplingParams(max_new_tokens=shape.new_tokens, ignore_eos=True))
            for prompt, shape in zip(random_prompts(shapes, vocab_size, seed), shapes, strict=True)
        ]
        with CpuShares() as shares:
            started = clock()
            results = collect(requests, engine.submit_all(requests), advance)
            elapsed = clock() - started
    measured = {request.request_id for request in requests}
    # the engine is closed: the last iteration has been seen too
    iterations = [iteration for iteration in seen if iteration.parts[0].request_id in measured]
    return Run(policy, number, started, elapsed, results, iterations, shares.foreign, shares.own)
