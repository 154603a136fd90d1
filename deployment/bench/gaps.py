"""What a long prompt does to the streams that run beside it: the largest gap between two of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Final

from rich.table import Table

from deployment.bench.machine import CpuShares
from deployment.bench.workloads import Shape, random_prompts
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel
from orca_core.iterations import Iteration
from orca_core.types import SamplingParams

_STREAM_PROMPT_TOKENS: Final = 32
_ALONE: Final = 24
"""Tokens every stream has before the long prompt comes: the iterations it is compared with."""
_LONG_OUTPUT_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Gaps:
    """One budget. Milliseconds.

    ``alone_ms``: the median iteration of the streams without the long prompt; ``beside_ms``: the median of those with
    a piece of it; ``largest_gap_ms``: between two tokens of one stream, over the whole run.
    """

    max_batch_tokens: int
    long_prompt_tokens: int
    alone_ms: float
    beside_ms: float
    largest_gap_ms: float
    long_ttft_ms: float
    foreign_cpu: float

    @property
    def ratio_to_median(self) -> float:
        """The largest gap over the median iteration of the time in which the long prompt was computed."""
        return self.largest_gap_ms / self.beside_ms

    @property
    def ratio_to_alone(self) -> float:
        """The largest gap over the median iteration before it came."""
        return self.largest_gap_ms / self.alone_ms

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio_to_median": self.ratio_to_median, "ratio_to_alone": self.ratio_to_alone}


def gaps_config(config: EngineConfig, n_streams: int, smallest_budget: int, max_model_len: int) -> EngineConfig:
    """``config`` with slots for the longest prompt and the streams beside it."""
    n_pieces = -(-max_model_len // max(1, smallest_budget - n_streams))
    streams = n_streams * (_STREAM_PROMPT_TOKENS + _ALONE + n_pieces + 16)
    return replace(config, n_slots=max_model_len + streams, max_model_len=max_model_len, max_batch_size=n_streams + 1)


def measure_gaps(config: EngineConfig, model: LoadedModel, n_streams: int, budget: int, seed: int = 0) -> Gaps:
    """Start ``n_streams`` streams, let them run, submit a prompt that fills the rest of the model's length.

    ``budget``: the ``max_batch_tokens`` to measure. The streams go on until the long prompt has been computed.
    """
    n_long = model.info.max_model_len - _LONG_OUTPUT_TOKENS
    n_pieces = -(-n_long // max(1, budget - n_streams))
    shapes = [Shape(_STREAM_PROMPT_TOKENS, _ALONE + n_pieces + 8)] * n_streams + [Shape(n_long, _LONG_OUTPUT_TOKENS)]
    prompts = random_prompts(shapes, model.info.vocab_size, seed)
    seen: list[Iteration] = []
    with (
        Engine(replace(config, max_batch_tokens=budget), model=model, on_iteration=seen.append) as engine,
        CpuShares() as shares,
    ):
        requests = [
            engine.make_request(prompt, SamplingParams(max_new_tokens=shape.new_tokens, ignore_eos=True))
            for prompt, shape in zip(prompts, shapes, strict=True)
        ]
        channels = engine.submit_all(requests[:-1])
        n_told = 0
        while n_told < _ALONE:
            n_told += len(next(channels[0]).token_ids)
        last = list(engine.submit(requests[-1]))[-1]
        for channel in channels:
            for _ in channel:
                pass
    assert last.timings is not None  # noqa: S101 - the last chunk has them
    return summarise(seen, requests[-1].request_id, budget, n_long, last.timings.ttft_s, shares.foreign)


def summarise(
    iterations: Sequence[Iteration], long_id: str, budget: int, n_long: int, ttft_s: float, foreign_cpu: float
) -> Gaps:
    """The figures of a run, from its iterations. Every stream has a row in all: their ends are its tokens' times."""
    pieces = [i for i in iterations if any(part.request_id == long_id and part.initiation for part in i.parts)]
    alone = [i for i in iterations if i.ended_s <= pieces[0].started_s and all(p.n_tokens == 1 for p in i.parts)]
    streams = [i for i in iterations if any(part.request_id != long_id for part in i.parts)]
    gaps = [after.ended_s - before.ended_s for before, after in pairwise(streams)]
    return Gaps(
        budget, n_long, 1000 * median(i.seconds for i in alone), 1000 * median(i.seconds for i in pieces),
        1000 * max(gaps[1:]), 1000 * ttft_s, foreign_cpu,
    )  # fmt: skip


def gaps_table(found: Sequence[Gaps], n_streams: int) -> Table:
    """One row a budget."""
    table = Table(
        title=f"{n_streams} streams beside a prompt of {found[0].long_prompt_tokens} tokens",
        caption="ms; alone, beside: median iteration without and with it\n"
        "gap: the largest of a stream; foreign: CPU of others",
        box=None,
        header_style="bold",
    )
    for name in ("budget", "alone", "beside", "gap", "/beside", "/alone", "first token", "foreign"):
        table.add_column(name, justify="right")
    for gaps in found:
        table.add_row(
            str(gaps.max_batch_tokens), f"{gaps.alone_ms:.1f}", f"{gaps.beside_ms:.1f}", f"{gaps.largest_gap_ms:.1f}",
            f"{gaps.ratio_to_median:.2f}", f"{gaps.ratio_to_alone:.2f}", f"{gaps.long_ttft_ms:.0f}",
            f"{gaps.foreign_cpu:.0%}",
        )  # fmt: skip
    return table
