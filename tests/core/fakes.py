"""Executors without a model: the token they choose depends on the request's own tokens alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch

from orca_core.batch import Batch, Span
from orca_core.request import Request
from orca_core.sampling import SampledToken

VOCAB = 300


def next_token(request: Request) -> int:
    """Any id but those below 10, from all tokens so far: a wrong or foreign token changes everything after it."""
    value = 17
    for token_id in request.token_ids:
        value = (value * 31 + token_id) % 1_000_003
    return 10 + value % (VOCAB - 10)


class FakeExecutor:
    """Counts iterations, and can be told to wait, to fail, or to give a request logits that are not finite."""

    def __init__(self, choose: Callable[[Request], int] = next_token) -> None:
        self.device = torch.device("cpu")
        self.batches: list[list[tuple[str, int]]] = []
        self.errors: list[Exception] = []  # raised by the coming iterations, first to last
        self.broken: set[str] = set()
        self.recovered: list[Exception] = []  # what ``recover`` was told
        self.is_lost = False  # what ``recover`` says of the device
        self._choose = choose
        self._gate: threading.Semaphore | None = None
        self._held = threading.Event()

    def hold(self) -> None:
        """From now on an iteration needs a permit of ``step``."""
        self._gate = threading.Semaphore(0)

    def wait_until_held(self) -> None:
        """Until an iteration waits for its permit."""
        assert self._held.wait(20)

    def step(self, n_iterations: int = 1) -> None:
        """Let that many iterations go on."""
        assert self._gate is not None
        self._gate.release(n_iterations)

    def let_go(self) -> None:
        """End of ``hold``."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release(1000)

    def recover(self, error: Exception) -> bool:
        self.recovered.append(error)
        return not self.is_lost

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        gate = self._gate
        if gate is not None:
            self._held.set()
            assert gate.acquire(timeout=20)
        self.batches.append([(span.request.request_id, span.n_tokens) for span in batch.spans])
        if self.errors:
            raise self.errors.pop(0)
        assert len(set(batch.slots.tolist())) == batch.n_tokens, "two tokens in one slot"
        return [
            SampledToken(self._choose(request), request.request_id not in self.broken, None)
            for request in batch.sampling_requests
        ]


class PagedExecutor(FakeExecutor):
    """Also keeps what a pool would, in each slot its position and token, and looks at all that attention would read.

    ``fail_at``: numbers of iterations that fail, half-way through. Neither they nor ``broken`` requests write anything
    that anybody could use. ``wrong``: requests that would have attended over what is not theirs.
    """

    def __init__(self, block_size: int, fail_at: Collection[int] = ()) -> None:
        super().__init__()
        self.block_size = block_size
        self.memory: dict[int, tuple[int, int] | None] = {}
        self.fail_at = fail_at
        self.wrong: list[str] = []

    def run_iteration(self, batch: Batch) -> Sequence[SampledToken]:
        fails = len(self.batches) in self.fail_at
        if fails:
            self.errors.append(RuntimeError("half-way through"))
        slots, tokens, positions = batch.slots.tolist(), batch.tokens.tolist(), batch.positions.tolist()
        for span in batch.spans:
            spoiled = fails or span.request.request_id in self.broken
            for row in range(span.start, span.end):
                self.memory[slots[row]] = None if spoiled else (positions[row], tokens[row])
        sampled = super().run_iteration(batch)
        for span in batch.spans:
            name = span.request.request_id
            if name not in self.broken and self.read(span) != list(enumerate(span.request.token_ids[: span.context])):
                self.wrong.append(name)
        return sampled

    def read(self, span: Span) -> list[tuple[int, int] | None]:
        """What is in the slots that attention reads for a span."""
        size = self.block_size
        slots = [slot for block in span.blocks for slot in range(block * size, block * size + size)]
        return [self.memory.get(slot) for slot in slots[: span.context]]
