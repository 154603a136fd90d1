"""The shapes of iteration that a roofline has points for, what no iteration of a shape can beat, and its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from deployment.bench.ceilings import Ceilings
from orca_core.iterations import Iteration
from orca_core.models import AnyDecoder

N_WARM: Final = 2
"""Turns of a run that don't count."""
BATCHES: Final = (1, 2, 4, 8, 16, 32)
CONTEXTS: Final = (128, 1024)
PROMPTS: Final = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Shape:
    """One more token for each of ``batch`` requests of ``context`` tokens, or so; or one whole prompt of as many."""

    kind: Literal["increment", "initiation"]
    batch: int
    context: int

    @property
    def label(self) -> str:
        """Requests, and the context they have; rows of an initiation."""
        return f"{self.batch} at {self.context}" if self.kind == "increment" else f"{self.context} rows"

    @property
    def n_rows(self) -> int:
        """In an iteration."""
        return self.batch if self.kind == "increment" else self.context

    def n_slots(self, n_turns: int) -> int:
        """It takes, when so many turns are looked at."""
        return self.batch * (self.context + (n_turns + 2 * N_WARM if self.kind == "increment" else N_WARM))

    def is_of(self, iteration: Iteration) -> bool:
        """Whether an engine's iteration had this shape."""
        initiation = self.kind == "initiation"
        return (
            len(iteration.parts) == self.batch
            and all(part.initiation == initiation for part in iteration.parts)
            and iteration.n_tokens == self.n_rows
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One shape, measured. ``ms``: the median turn; ``best_ms``: the fastest of ``n_runs``.

    ``parts``: of ``ms``, by what it went into (see ``laps.PARTS``), in a run of its own, in which a turn took
    ``watched_ms``. They have the shares they had there, in the faster half of its turns, so they add up to ``ms``.
    ``read_ms``, ``product_ms``: reading weights, K and V once, and multiplying, at the ceilings.
    """

    shape: Shape
    ms: float
    best_ms: float
    watched_ms: float
    parts: dict[str, float]
    read_ms: float
    product_ms: float
    n_runs: int
    foreign_cpu: float

    @property
    def floor_ms(self) -> float:
        """What no turn of this shape can beat: the larger of reading and multiplying."""
        return max(self.read_ms, self.product_ms)

    @property
    def ratio(self) -> float:
        """1.0 = as fast as the machine allows."""
        return self.ms / self.floor_ms

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "batch": self.shape.batch, "context": self.shape.context, "ms": self.ms, "floor_ms": self.floor_ms,
            "ratio": self.ratio, "parts": self.parts, "best_ms": self.best_ms, "watched_ms": self.watched_ms,
            "read_ms": self.read_ms, "product_ms": self.product_ms, "n_runs": self.n_runs,
            "foreign_cpu": self.foreign_cpu,
        }  # fmt: skip


def floor_s(decoder: AnyDecoder, shape: Shape, ceilings: Ceilings) -> tuple[float, float]:
    """Seconds to read weights, K and V once, and to multiply: what an iteration of that shape cannot do without."""
    config, n_rows = decoder.config, shape.n_rows
    per_request = n_rows / shape.batch
    head = config.vocab_size * config.hidden_size
    weights = decoder.n_parameters - (0 if config.tied_head else head)  # an embedding is looked up
    flop = 2.0 * (n_rows * (weights - head) + shape.batch * head)
    n_slots = 0.0
    for layer in config.layers:
        window = shape.context if layer.window is None else layer.window
        # every row sees half of its own piece and all that was there before
        seen = n_rows * min(shape.context - per_request / 2, window)
        flop += 4.0 * seen * config.n_heads * config.head_dim
        n_slots += shape.batch * min(shape.context, window + per_request - 1)
    n_bytes = decoder.weight_bytes + n_slots * decoder.kv_shape.bytes_per_slot / config.n_layers
    return n_bytes / ceilings.bytes_per_s, flop / ceilings.flop_per_s


def fitting(
    shapes: Sequence[Shape], decoder: AnyDecoder, n_turns: int, n_bytes: int
) -> tuple[list[Shape], list[tuple[Shape, str]]]:
    """Shapes the model takes and whose K and V fit into ``n_bytes``; those left out, and why."""
    limit = decoder.config.max_position_embeddings
    left_out = []
    for shape in shapes:
        needed = shape.n_slots(n_turns) * decoder.kv_shape.bytes_per_slot
        if shape.n_slots(n_turns) > shape.batch * limit:
            left_out.append((shape, f"the model takes {limit} tokens"))
        elif needed > n_bytes:
            left_out.append((shape, f"its K and V need {needed >> 20} MiB, {n_bytes >> 20} may be used"))
    return [shape for shape in shapes if all(shape is not out for out, _ in left_out)], left_out


def all_shapes(*, quick: bool) -> list[Shape]:
    """In the order they are measured; ``quick``: some of them."""
    batches, contexts = ((1, 4, 16), CONTEXTS[:1]) if quick else (BATCHES, CONTEXTS)
    increments = [Shape("increment", batch, context) for context in contexts for batch in batches]
    return increments + [Shape("initiation", 1, n_rows) for n_rows in (PROMPTS[:1] if quick else PROMPTS)]
