from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deployment.bench.gaps import gaps_config, summarise
from deployment.cli.main import app
from orca_core.config import EngineConfig
from orca_core.iterations import Iteration, IterationPart


def iteration(start: float, end: float, *parts: tuple[str, int, bool]) -> Iteration:
    return Iteration(start, end, tuple(IterationPart(*part) for part in parts))


STREAMS = (("a", 1, False), ("b", 1, False))


def test_the_figures_of_a_run() -> None:
    iterations = [
        iteration(0.0, 9.0, ("a", 30, True), ("b", 30, True)),  # their own prompts: not a gap between tokens
        iteration(9.0, 10.0, *STREAMS),
        iteration(10.0, 11.0, *STREAMS),
        iteration(11.0, 13.0, *STREAMS),
        iteration(13.0, 17.0, *STREAMS, ("long", 60, True)),
        iteration(17.0, 23.0, *STREAMS, ("long", 60, True)),
        iteration(23.0, 28.0, *STREAMS, ("long", 9, True)),
        iteration(28.5, 29.0, *STREAMS, ("long", 1, False)),
        iteration(29.0, 49.0, ("long", 1, False)),  # nobody but the long one waits for this
    ]
    gaps = summarise(iterations, "long", 62, 129, 16.0, 0.0)
    assert (gaps.alone_ms, gaps.beside_ms, gaps.largest_gap_ms, gaps.long_ttft_ms) == (1000, 5000, 6000, 16000)
    assert (gaps.ratio_to_median, gaps.ratio_to_alone) == (1.2, 6.0)
    assert gaps.record()["ratio_to_alone"] == 6.0


def test_there_is_room_for_all_of_them() -> None:
    config = gaps_config(EngineConfig(), 4, 32, 2048)
    assert (config.max_model_len, config.max_batch_size) == (2048, 5)
    assert config.n_slots is not None
    assert config.n_slots >= 2048 + 4 * (32 + 24 + 2040 // 28 + 8)


@pytest.mark.parametrize("budgets", ["4", "x", "3,64"])
def test_unusable_budgets(budgets: str) -> None:
    result = CliRunner().invoke(app, ["bench", "gaps", "--budgets", budgets])
    assert isinstance(result.exception, Exception)
    assert "--budgets" in str(result.exception)
