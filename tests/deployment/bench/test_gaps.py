from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deployment.bench.gaps import gaps_config, summarise
from deployment.cli.main import app
from orca_core.config import EngineConfig
from orca_core.executor import LoadedModel
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


@pytest.fixture
def loaded(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("orca_core.loader.load_engine_model", lambda _: model)
    return model


def test_gaps_says_how_far_it_is_and_what_the_model_takes(loaded: LoadedModel) -> None:
    arguments = ["bench", "gaps", "--budgets", "256,512", "--streams", "2", "--length", "100000"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    said = " ".join(result.stderr.split())
    assert "1 of 2, max_batch_tokens 256 2 of 2, max_batch_tokens 512" in said
    assert f"takes {loaded.info.max_model_len} tokens" in said
    assert "not for 100000" in said
    assert "max_batch_tokens 256" not in result.stdout
    result = CliRunner().invoke(app, [*arguments[:-1], "1024"], catch_exceptions=False)
    assert "the long prompt is made for them" not in " ".join(result.stderr.split())


@pytest.mark.usefixtures("loaded")
def test_exactness_says_how_far_it_is() -> None:
    result = CliRunner().invoke(
        app, ["bench", "exactness", "--requests", "3", "--new-tokens", "4"], catch_exceptions=False
    )
    lines = result.stderr.splitlines()
    assert "3 requests of 4 tokens, each alone" in lines
    assert [line[:6] for line in lines[2:]] == [f"{i} of 5" for i in range(1, 6)]
