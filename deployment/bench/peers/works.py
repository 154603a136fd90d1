"""What every engine is asked to do, and what its answers mean."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from deployment.bench.summary import percentile
from deployment.bench.workloads import Shape, random_prompts, shapes_of

TRACE: Final = "trace"
CLOSED: Final = ("increment", "initiation", "equal_size", "short_long_mix")
"""Workloads in which all requests are there at once."""
HEADLINES: Final[dict[str, tuple[str, ...]]] = {
    "increment": ("increment_ms",),
    "initiation": ("initiation_ms",),
    "equal_size": ("output_tok_per_s",),
    "short_long_mix": ("output_tok_per_s",),
    TRACE: ("e2e_ms", "ttft_p95_ms"),
}
"""What is compared, by workload."""
LONGEST: Final = 640
"""Tokens of the longest request there is: 512 in, 128 out."""
INCREMENT: Final = Shape(128, 64)
INITIATION: Final = Shape(512, 1)
_SHORT_REPEATS: Final = 3
"""Times that what takes a second at most is run in a turn; the median counts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds after the start at which it arrives, its token ids, and how many tokens it generates."""

    at_s: float
    prompt: list[int]
    new_tokens: int

    def record(self) -> dict[str, Any]:
        """As it goes to a runner."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Times:
    """What became of one: seconds after the start at which it arrived, had its first token and its last."""

    at_s: float
    first_s: float
    last_s: float
    n_prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """A workload at one batch size. ``rate``: requests/s offered, of ``trace`` only."""

    name: str
    batch: int
    n_requests: int = 16
    rate: float = 0.0

    @property
    def key(self) -> str:
        """Its name among others."""
        return f"{self.name}@{self.rate:g}" if self.rate else self.name

    @property
    def repeats(self) -> int:
        """Times it is run in one turn."""
        return _SHORT_REPEATS if self.name in ("increment", "initiation") else 1

    def asks(self, vocab_size: int, seed: int) -> list[Ask]:
        """The requests; the same for the same seed, and no two seeds share a prompt."""
        if self.name == TRACE:
            return poisson_trace(self.n_requests, self.rate, vocab_size, seed)
        if self.name == "increment":
            shapes = [INCREMENT] * self.batch
        elif self.name == "initiation":
            shapes = [INITIATION]
        elif self.name == "equal_size":
            shapes = shapes_of("equal_size", self.n_requests)
        else:
            shapes = shapes_of("short_long_mix", self.n_requests)
        return at_once(shapes, vocab_size, seed)


def at_once(shapes: Sequence[Shape], vocab_size: int, seed: int) -> list[Ask]:
    """Random prompts of these shapes that all arrive at the start."""
    prompts = random_prompts(shapes, vocab_size, seed)
    return [Ask(0.0, prompt, shape.new_tokens) for prompt, shape in zip(prompts, shapes, strict=True)]


def warmups(batch: int, vocab_size: int) -> list[list[Ask]]:
    """What every engine does once before anything counts: a full batch of short ones, and a long prompt."""
    return [at_once([Shape(128, 8)] * batch, vocab_size, -1), at_once([Shape(512, 4)], vocab_size, -2)]


def poisson_trace(n_requests: int, rate: float, vocab_size: int, seed: int) -> list[Ask]:
    """The paper's (6.2): prompts of U(32, 512) tokens, outputs of U(1, 128), exponential gaps of mean ``1 / rate`` s.

    Lengths and gaps, up to ``rate``, are always the same; ``seed`` decides over the token ids alone. So rounds, and
    rates, differ in nothing else.
    """
    chance = random.Random(7)
    gaps = [chance.expovariate(1.0) for _ in range(n_requests)]
    shapes = [Shape(chance.randint(32, 512), chance.randint(1, 128)) for _ in range(n_requests)]
    arrivals = [sum(gaps[: index + 1]) / rate for index in range(n_requests)]
    prompts = random_prompts(shapes, vocab_size, seed)
    return [Ask(at_s, prompt, shape.new_tokens) for at_s, prompt, shape in zip(arrivals, prompts, shapes, strict=True)]


def measure(work: Work, times: Sequence[Times]) -> dict[str, float]:
    """Metrics of one run; milliseconds where the name ends so. Raises ``ValueError`` for times without a duration."""
    if work.name == "increment":
        return {"increment_ms": increment_ms(times)}
    if work.name == "initiation":
        return {"initiation_ms": 1e3 * statistics.fmean(each.first_s - each.at_s for each in times)}
    elapsed = max(each.last_s for each in times) - min(each.at_s for each in times)
    if elapsed <= 0:
        raise ValueError("it took no time")
    first = [1e3 * (each.first_s - each.at_s) for each in times]
    whole = [1e3 * (each.last_s - each.at_s) for each in times]
    return {
        "output_tok_per_s": sum(each.new_tokens for each in times) / elapsed,
        "requests_per_s": len(times) / elapsed,
        "ttft_ms": statistics.fmean(first),
        "ttft_p95_ms": percentile(first, 0.95),
        "e2e_ms": statistics.fmean(whole),
        "e2e_p95_ms": percentile(whole, 0.95),
    }


def increment_ms(times: Sequence[Times]) -> float:
    """Milliseconds from one token to the next once every request has its first.

    Counted at the request that had its first token last: it is in every iteration since.
    """
    last = max(times, key=lambda each: each.first_s)
    end = max(each.last_s for each in times)
    if last.new_tokens < 2 or end <= last.first_s:
        raise ValueError("there is no increment in it")
    return 1e3 * (end - last.first_s) / (last.new_tokens - 1)


def median_metrics(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each metric over the runs of one turn."""
    found = list(runs)
    middle: Callable[[str], float] = lambda name: statistics.median(run[name] for run in found)  # noqa: E731
    return {name: middle(name) for name in found[0]}
