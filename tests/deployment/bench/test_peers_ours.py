"""Our own runner, and the command with nobody to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployment.bench.peers.compare import Plan
from deployment.bench.peers.engines import Setup
from deployment.bench.peers.ours import run
from deployment.bench.peers.settings import Peer, Target
from deployment.bench.peers.tables import make_record, tables
from deployment.bench.peers.works import Work
from deployment.cli.bench_peers import chosen, contestants, rates_of, say_who, works_of
from deployment.cli.main import main
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import ConfigError
from orca_core.executor import LoadedModel

CONFIG = EngineConfig(model="fake", max_batch_size=4, n_slots=256, block_size=16, prefix_cache=False)


class Clock:
    """Stands still but for who sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """At once."""
        self.slept.append(seconds)
        self.now += seconds


def test_requests_are_submitted_when_they_arrive(model: LoadedModel) -> None:
    asks: list[dict[str, Any]] = [
        {"at_s": at_s, "prompt": [1, 2, 3], "new_tokens": new_tokens}
        for at_s, new_tokens in ((0.0, 2), (0.0, 3), (7.5, 1))
    ]
    clock = Clock()
    with Engine(CONFIG, model=model, clock=clock) as engine:
        said = run(engine, asks, clock, clock.sleep)["requests"]
    assert clock.slept == [7.5]
    assert [each["tokens"] for each in said] == [2, 3, 1]
    assert all(ask["at_s"] <= each["first_s"] <= each["last_s"] for ask, each in zip(asks, said, strict=True))
    assert said[2]["first_s"] == 7.5


def test_each_workload_has_batch_sizes_of_its_own() -> None:
    assert works_of(["initiation", "equal_size"], None, (), None) == (
        Work("initiation", 1), Work("equal_size", 2), Work("equal_size", 8), Work("equal_size", 16),
    )  # fmt: skip
    assert works_of(["initiation", "increment"], [4], (), 8) == (Work("initiation", 1, 8), Work("increment", 4, 8))
    assert works_of(["trace"], None, (1.0, 2.0), None) == (Work("trace", 16, 64, 1.0), Work("trace", 16, 64, 2.0))


def test_ours_runs_in_each_precision_that_a_peer_has() -> None:
    setup, quantised = Setup("m", "", 2), Peer("q", "int4", ("run",), ("serve",))
    labels = [each.label for each in contestants([quantised], setup, is_trace=False)]
    assert labels == ["orca-serve int4", "q"]
    modules = [each.argv(1)[2] for each in contestants([quantised], setup, is_trace=True)]
    assert [module.rpartition(".")[2] for module in modules] == ["service", "openai"]
    assert [each.label for each in contestants([], setup, is_trace=False)] == ["orca-serve bf16"]


def test_who_has_no_peers_is_told_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    say_who([], {"a": ["/x/a"]}, None, "m")
    said = capsys.readouterr().err
    assert "not here: a\n" in said
    assert "--home" in said
    say_who([], {"a": ["/x/a", "/x/b"]}, tmp_path, "m")
    assert "not here: a (no /x/a, no /x/b)" in capsys.readouterr().err
    say_who([Peer("a", "bf16", ("run",))], {}, tmp_path, str(tmp_path))
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="is no folder"):
        say_who([Peer("a", "bf16", ("run",))], {}, tmp_path, "smollm2-135m-instruct")


def test_names_and_rates_are_checked() -> None:
    assert chosen("--peers", "b, a,b", ("a", "b")) == ["b", "a"]
    assert rates_of("1,2.5") == (1.0, 2.5)
    with pytest.raises(ConfigError, match="none of a, b"):
        chosen("--peers", "c", ("a", "b"))
    for text in ("", "0", "-1", "x", "inf", "nan"):
        with pytest.raises(ConfigError, match="positive"):
            rates_of(text)


@pytest.mark.parametrize(
    "arguments",
    [["--workloads", "trace,increment"], ["--peers", "nobody"], ["--batches", "0"], ["--json", "/no/x.json"],
     ["--config", "/no/peers.toml"], ["--precisions", "fp4"]],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_is_started(arguments: list[str]) -> None:
    assert main(["bench", "peers", *arguments]) == 2


def _record(ours: dict[str, float], theirs: dict[str, float] | None) -> dict[str, Any]:
    shared = {"precision": "bf16", "workload": "trace", "rate": 2.0, "batch": 16, "round": 0, "foreign_cpu": 0.0,
              "own_cpu": 0.9}  # fmt: skip
    runs = [shared | {"engine": "orca-serve bf16", "is_ours": True, "metrics": ours}]
    if theirs is not None:
        runs.append(shared | {"engine": "a", "is_ours": False, "metrics": theirs})
    targets = [
        Target("a", "trace", "e2e_ms", 16, at_most=0.5), Target("a", "trace", "ttft_p95_ms", 16, at_most=1.0),
        Target("a", "trace", "e2e_ms", 8, at_most=0.5),
    ]  # fmt: skip
    return make_record(Setup("m", "", 2), Plan((), 1), targets, runs, [], {"b": ["/x"]})


def test_the_record_and_its_tables() -> None:
    record = _record({"e2e_ms": 1.0, "ttft_p95_ms": 3.0}, {"e2e_ms": 2.0, "ttft_p95_ms": 2.0})
    assert [(each["metric"], each["ratio"]) for each in record["comparisons"]] == [
        ("e2e_ms", 0.5),
        ("ttft_p95_ms", 1.5),
    ]
    assert record["absent"] == {"b": ["/x"]}
    table, targets = tables(record)
    assert list(table.columns[0].cells) == ["trace, 2/s", "trace, 2/s"]
    assert list(targets.columns[6].cells) == ["holds", "missed"]
    (alone,) = tables(_record({"e2e_ms": 1.0}, None))
    assert list(alone.columns[4].cells) == ["e2e_ms 1.0"]
