"""The runs, their record, the picture, and the command around them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployment.bench.bound import rows_by_iteration
from deployment.bench.machine import CpuShares, describe_machine
from deployment.bench.offline import OfflineOptions, Policy, Run, bench_config, run_all
from deployment.bench.report import LATENCIES, Measured, make_record, tables, warnings
from deployment.cli.main import main
from orca_core.config import EngineConfig
from orca_core.executor import LoadedModel

CONFIG = EngineConfig(max_batch_size=2, max_batch_tokens=512)


def watch(told: list[tuple[Policy, int]]) -> Callable[[Policy, int], Callable[[], object]]:
    def start(policy: Policy, number: int) -> Callable[[], object]:
        return lambda: told.append((policy, number))

    return start


def measure(model: LoadedModel, **changes: Any) -> Measured:
    fields = {
        "workload": "short_long_mix",
        "n_requests": 4,
        "policies": ("iteration", "static"),
        "rounds": 1,
        "seed": 0,
    }
    options = OfflineOptions(**(fields | changes))
    config = bench_config(CONFIG, options.shapes)
    return Measured(options, config, model.info, {"cpu": "some"}, run_all(config, model, options, watch([])))


@pytest.fixture(scope="module")
def measured(model: LoadedModel) -> Measured:
    return measure(model)


def test_policies_take_turns_and_every_request_is_told(model: LoadedModel) -> None:
    options = OfflineOptions("short_long_mix", 2, ("iteration", "static"), 2, 0)
    told: list[tuple[Policy, int]] = []
    runs = run_all(bench_config(CONFIG, options.shapes), model, options, watch(told))
    order = [("iteration", 0), ("static", 0), ("static", 1), ("iteration", 1)]
    assert [(run.policy, run.round) for run in runs] == order
    assert told == [each for each in order for _ in range(2)]
    prompts = [[result.prompt_token_ids for result in run.results] for run in runs]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_slots_are_just_enough_for_a_full_batch() -> None:
    options = OfflineOptions("short_long_mix", 4, ("static",), 1, 0)
    assert bench_config(CONFIG, options.shapes).n_slots == 2 * (512 + 128)


def test_a_run_is_the_workload_scheduled_by_its_policy(measured: Measured) -> None:
    shapes = measured.options.shapes
    for run in measured.runs:
        assert [len(result.token_ids) for result in run.results] == [shape.new_tokens for shape in shapes]
        assert [len(result.prompt_token_ids) for result in run.results] == [s.n_prompt_tokens for s in shapes]
        expected = rows_by_iteration(shapes, 2, 512, joins=run.policy == "iteration")
        assert [iteration.n_tokens for iteration in run.iterations] == expected
        assert run.output_tokens == 320


def test_the_record_is_plain_and_complete(measured: Measured) -> None:
    record = json.loads(json.dumps(make_record(measured), allow_nan=False))
    assert record["schema"] == "orca-serve/bench-offline/1"
    assert record["workload"]["shapes"] == [[32, 32], [512, 128]] * 2
    assert (record["workload"]["input_tokens"], record["workload"]["output_tokens"]) == (1088, 320)
    settings = record["settings"]
    assert (settings["batch"], settings["max_batch_tokens"], settings["dtype"]) == (2, 512, "float32")
    assert [(run["policy"], run["round"]) for run in record["runs"]] == [("iteration", 0), ("static", 0)]
    for run in [*record["runs"], *record["policies"].values()]:
        assert run["requests_per_s"] == pytest.approx(4 / run["elapsed_s"])
        assert run["output_tok_per_s"] == pytest.approx(320 / run["elapsed_s"])
        for latency in LATENCIES:
            assert list(run[latency]) == ["mean", "p50", "p95", "p99"]
            assert all(value > 0 for value in run[latency].values())
        assert run["in_iterations_s"] + run["between_iterations_s"] == pytest.approx(run["elapsed_s"])
        assert run["foreign_cpu"] >= 0
    iteration, static = record["runs"]
    assert record["ratios"]["requests_per_s"] == pytest.approx(iteration["requests_per_s"] / static["requests_per_s"])
    assert iteration["returned_ms"] == iteration["e2e_ms"]
    assert static["returned_ms"]["mean"] > static["e2e_ms"]["mean"]


def at_cost(run: Run, scale: float) -> Run:
    """The same iterations, each ``scale`` seconds long and a hundredth more for each row; nothing between them."""
    iterations, now = [], 0.0
    for iteration in run.iterations:
        end = now + scale * (1 + iteration.n_tokens / 100)
        iterations.append(replace(iteration, started_s=now, ended_s=end))
        now = end
    return replace(run, iterations=iterations, started_s=0.0, elapsed_s=now)


def test_the_bound_in_the_record_uses_what_was_measured(measured: Measured) -> None:
    runs = [at_cost(run, 1.0) for run in measured.runs]
    bound = make_record(replace(measured, runs=runs))["bound"]
    assert {entry["rows"]: entry["seconds"] for entry in bound["iteration_cost"]} == pytest.approx(
        {1: 1.01, 2: 1.02, 33: 1.33, 512: 6.12}
    )
    # each batch: 32 + 480 rows, the other 32 beside an increment, 30 increments of both, 97 of the long one alone
    assert bound["static_s"] == pytest.approx(2 * (6.12 + 1.33 + 30 * 1.02 + 97 * 1.01))
    assert runs[0].elapsed_s == pytest.approx(bound["arrival_order_s"])
    for key in ("arrival_order", "achieved", "achieved_at_median_cost"):
        assert bound[key] == pytest.approx(bound["static_s"] / bound["arrival_order_s"])
    assert bound["ideal"] == pytest.approx(bound["static_s"] / bound["ideal_s"])
    assert bound["achieved_of_ideal"] == pytest.approx(bound["achieved"] / bound["ideal"])
    assert bound["achieved_of_arrival_order"] == pytest.approx(1)


def test_at_median_cost_a_disturbed_run_counts_as_the_others(measured: Measured) -> None:
    iteration, static = measured.runs
    disturbed = [
        at_cost(run, scale) for run, scale in ((iteration, 1.0), (static, 1.0), (iteration, 1.0), (static, 3.0))
    ]
    bound = make_record(replace(measured, runs=[*disturbed, at_cost(iteration, 1.0), at_cost(static, 1.0)]))["bound"]
    assert bound["achieved_at_median_cost"] == pytest.approx(bound["arrival_order"])


def test_on_the_cpu_clock_waiting_takes_no_time(model: LoadedModel) -> None:
    options = OfflineOptions("equal_size", 1, ("iteration",), 1, 0, "cpu")
    before = time.process_time()
    (run,) = run_all(bench_config(CONFIG, options.shapes), model, options, watch([]))
    assert before <= run.started_s <= run.iterations[0].started_s
    assert run.iterations[-1].ended_s <= time.process_time()
    assert 0 < run.elapsed_s <= time.process_time() - before


def test_one_policy_alone_has_no_ratios(model: LoadedModel) -> None:
    record = make_record(measure(model, policies=("static",), n_requests=1, workload="equal_size"))
    assert set(record["policies"]) == {"static"}
    assert not {"ratios", "bound"} & set(record)
    assert len(tables(record)) == 2


def test_a_busy_machine_is_named(measured: Measured) -> None:
    record = make_record(measured)
    for run in record["runs"]:
        run["foreign_cpu"] = 0.01
    assert warnings(record) == []
    record["runs"][1]["foreign_cpu"] = 0.42
    assert "42%" in warnings(record)[0]


def test_shares_of_the_cpus_are_own_and_foreign() -> None:
    with CpuShares() as shares:
        sum(range(3_000_000))
    assert 0 < shares.own <= 1
    assert 0 <= shares.foreign <= 1
    machine = describe_machine()
    assert machine["logical_cpus"] >= 1
    assert machine["torch"]


def test_the_picture_is_written(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from deployment.bench.plot import draw

    path = tmp_path / "picture.png"
    draw(path, measured.runs, "a caption")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


# ---- the command


@pytest.fixture
def loaded(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configs with which a model was asked for."""
    asked: list[EngineConfig] = []

    def load(config: EngineConfig) -> LoadedModel:
        asked.append(config)
        return model

    monkeypatch.setattr("orca_core.loader.load_engine_model", load)
    return asked


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(("bench", "offline", *arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_tables_and_writes_the_record(
    capsys: pytest.CaptureFixture[str], loaded: list[EngineConfig], tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    options = ("--workload", "short_long_mix", "--requests", "2", "--rounds", "1", "--threads", "1", "--model", "m")
    status, out, err = run(capsys, *options, "--batch", "600", "--dtype", "float32", "--json", str(file))
    assert status == 0
    assert all(word in out for word in ("requests_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "p99", "ideal", "achieved"))
    assert "round 1 of 1, static" in err
    record = json.loads(file.read_text())
    assert set(record["policies"]) == {"iteration", "static"}
    (config,) = loaded
    assert (config.model, config.dtype, config.threads) == ("m", "float32", 1)
    assert (config.max_batch_size, config.max_batch_tokens) == (600, 600)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload", "nope"), "--workload"),
        (("--policy", "nope"), "--policy"),
        (("--dtype", "int3"), "--dtype"),
        (("--batch", "0"), "--batch"),
        (("--rounds", "0"), "--rounds"),
        (("--requests", "x"), "--requests"),
        (("--json", "/nowhere/at/all.json"), "--json: there is no folder /nowhere/at"),
        (("--plot", "/nowhere/at/all.png"), "--plot: there is no folder /nowhere/at"),
        (("--model", ""), "model: must not be empty"),
        (("--nope",), "--nope"),
        (("--clock", "sun"), "--clock"),
        (("--clock", "cpu"), "--threads 1"),
        (("--clock", "cpu", "--threads", "2"), "--threads 1"),
    ],
)
def test_unusable_arguments_are_one_line_and_two(
    capsys: pytest.CaptureFixture[str], loaded: list[EngineConfig], arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out, loaded) == (2, "", [])
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], loaded: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "--plot", str(tmp_path / "x.png"))
    assert (status, out, loaded) == (1, "", [])
    assert err == "orca-serve: matplotlib is not installed; this needs: pip install 'orca-serve[bench]'\n"


def test_the_command_draws_the_first_round(
    capsys: pytest.CaptureFixture[str],
    loaded: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("deployment.bench.plot.draw", lambda *arguments: drawn.append(arguments))
    file = tmp_path / "x.png"
    assert run(capsys, "--requests", "1", "--rounds", "2", "--policy", "iteration", "--plot", str(file))[0] == 0
    ((path, runs, caption),) = drawn
    assert path == file
    assert [(each.policy, each.round) for each in runs] == [("iteration", 0)]
    assert all(isinstance(each, Run) for each in runs)
    assert "short_long_mix, 1 request" in caption
