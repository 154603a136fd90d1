"""An engine loop without its thread: one turn at a time, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from orca_core.channel import Channel
from orca_core.errors import OrcaError
from orca_core.executor import LoadedModel
from orca_core.kv import KVManager
from orca_core.loop import EngineLoop
from orca_core.scheduler import Scheduler
from orca_core.tokenizer import Tokenizer
from orca_core.types import GenerationChunk, GenerationRequest, ModelInfo, merge_chunks
from tests.core.fakes import VOCAB, PagedExecutor


class LoopBench:
    """A turn takes ``turn_s`` virtual seconds. ``ended``: how often each request was said to have ended."""

    def __init__(
        self, tokenizer: Tokenizer, *, n_slots: int = 160, block_size: int = 4, max_batch_size: int = 4,
        max_batch_tokens: int = 32, prefix_cache: bool = True, overtaking_s: float = 0.0, max_overtakers: int = 0,
        fail_at: Collection[int] = (), turn_s: float = 1.0, max_stream_backlog: int = 10_000,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.turn_s = turn_s
        self.executor = PagedExecutor(block_size, fail_at)
        self.kv = KVManager(n_slots, block_size, max_batch_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(max_batch_size, max_batch_tokens, overtaking_s, max_overtakers)
        info = ModelInfo("fake", "Fake", "float32", VOCAB, 10_000, n_slots, (), False)
        self.ended: Counter[str] = Counter()
        self.channels: dict[str, Channel] = {}
        self.loop = EngineLoop(
            LoadedModel(self.executor, tokenizer, info), self.scheduler, self.kv, clock=lambda: self.now,
            max_stream_backlog=max_stream_backlog, on_end=lambda name: self.ended.update([name]),
            on_books=lambda _: None,
        )  # fmt: skip

    def submit(self, spec: GenerationRequest) -> str:
        """A request arrives; its name."""
        channel = Channel(spec.request_id, self.loop.cancel)
        self.channels[spec.request_id] = channel
        self.loop.receive(spec, channel.ticket, self.now)
        return spec.request_id

    def turn(self) -> list[tuple[str, int]]:
        """One turn of the loop, as the engine's thread takes it; what was computed: (request, rows)."""
        n_before = len(self.executor.batches)
        if self.loop.idle:
            self.loop.settle()
        else:
            self.loop.run_iteration()
        self.now += self.turn_s
        return self.executor.batches[-1] if len(self.executor.batches) > n_before else []

    def run(self) -> int:
        """Until nothing is left to do; how many turns that took."""
        n_turns = 0
        while not self.loop.idle:
            self.turn()
            n_turns += 1
        self.loop.settle()
        return n_turns

    def outcome(self, name: str) -> tuple[GenerationChunk, OrcaError | None]:
        """All that was said of a request that has ended, and the error it ended with."""
        assert self.ended[name] == 1
        chunks, error = [GenerationChunk(name)], None
        try:
            chunks.extend(self.channels[name])  # what it took before an error stays
        except OrcaError as caught:
            error = caught
        return merge_chunks(chunks), error
