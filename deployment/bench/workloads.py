"""What is run: fixed lengths and random token ids of a fixed seed, so that every run does the same work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

WorkloadName = Literal["equal_size", "short_long_mix"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: tokens in its prompt, tokens it generates (never fewer: eos is ignored)."""

    n_prompt_tokens: int
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        """Its demand, in slots."""
        return self.n_prompt_tokens + self.new_tokens


_CYCLES: Final[dict[str, tuple[Shape, ...]]] = {
    "equal_size": (Shape(128, 128),),
    "short_long_mix": (Shape(32, 32), Shape(512, 128)),
}
"""The two workloads of tinyorca's ``bench.py``: shapes that are repeated in arrival order."""


def shapes_of(workload: WorkloadName, n_requests: int) -> list[Shape]:
    """The requests of a workload, in arrival order; all arrive at once."""
    cycle = _CYCLES[workload]
    return [cycle[index % len(cycle)] for index in range(n_requests)]


def random_prompts(shapes: Sequence[Shape], vocab_size: int, seed: int) -> list[list[int]]:
    """A prompt of random token ids for each shape; no two share a prefix, but by chance."""
    chance = random.Random(seed)
    return [[chance.randrange(vocab_size) for _ in range(shape.n_prompt_tokens)] for shape in shapes]
