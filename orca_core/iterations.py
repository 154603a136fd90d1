"""What one iteration did, for whoever watches: metrics, benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from orca_core.batch import Batch

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each row


class IterationPart(NamedTuple):
    """One request in an iteration. ``n_tokens``: rows it had; ``initiation``: they were rows of its prompt."""

    request_id: str
    n_tokens: int
    initiation: bool


@dataclass(frozen=True, slots=True)
class Iteration:
    """One finished iteration, from the choice of its batch to its tokens being handed on.

    ``started_s``, ``ended_s``: seconds on the engine's clock. ``parts``: in the order of their rows.
    """

    started_s: float
    ended_s: float
    parts: tuple[IterationPart, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.started_s

    @property
    def n_tokens(self) -> int:
        """Rows of the whole batch."""
        return sum([part.n_tokens for part in self.parts])


IterationObserver = Callable[[Iteration], None]
"""Called by the loop thread after each iteration that succeeded. It must neither block nor raise."""


def describe_iteration(batch: Batch, started_s: float, ended_s: float) -> Iteration:
    """The record of a batch that was run."""
    parts = [
        _new(IterationPart, (request.request_id, n_tokens, context - n_tokens < request.n_prompt_tokens))
        for request, _, n_tokens, context, _, _ in batch.spans
    ]
    return Iteration(started_s, ended_s, tuple(parts))
