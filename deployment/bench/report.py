"""From runs to a record in plain JSON values, and from a record to tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from deployment.bench.bound import Bound, IterationCost, bound_of
from deployment.bench.composition import compose, returned_s
from deployment.bench.offline import OfflineOptions, Run
from deployment.bench.summary import medians, ratios, summarize_ms
from orca_core.config import EngineConfig
from orca_core.types import ModelInfo

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = "orca-serve/bench-offline/1"
LATENCIES: Final = ("ttft_ms", "tpot_ms", "e2e_ms", "returned_ms")
QUIET: Final = 0.05
"""Share of all CPUs that others may use before a run counts as disturbed."""
_COLUMNS: Final = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything a record is made of."""

    options: OfflineOptions
    config: EngineConfig
    info: ModelInfo
    machine: dict[str, Any]
    runs: list[Run]


def make_record(measured: Measured) -> dict[str, Any]:
    """The record of a benchmark: settings, machine, every run, medians of each policy, ratios, bound.

    ``ratios``: iteration to static, the median over the rounds of the ratio within a round.
    """
    options, runs = measured.options, measured.runs
    rows = [run_record(run) for run in runs]
    by_policy = {policy: [row for row in rows if row["policy"] == policy] for policy in options.policies}
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": _workload_record(options),
        "settings": _settings_record(measured),
        "machine": measured.machine,
        "runs": rows,
        "policies": {policy: medians(_without_place(mine)) for policy, mine in by_policy.items()},
    }
    if {"iteration", "static"} <= by_policy.keys():
        pairs = zip(_in_order(by_policy["iteration"]), _in_order(by_policy["static"]), strict=True)
        record["ratios"] = medians([ratios(iteration, static) for iteration, static in pairs])
        record["bound"] = bound_record(measured, record["ratios"]["requests_per_s"])
    return record


def run_record(run: Run) -> dict[str, Any]:
    """One run: rates, latencies, and where its time went."""
    n, tokens = len(run.results), run.output_tokens
    back = returned_s(compose(run.iterations)) if run.policy == "static" else {}
    e2e = [result.metrics.total_s for result in run.results]
    returned = [back[result.request_id] - run.started_s for result in run.results] if back else e2e
    between = _between_s(run)
    return {
        "policy": run.policy,
        "round": run.round,
        "elapsed_s": run.elapsed_s,
        "requests_per_s": n / run.elapsed_s,
        "output_tok_per_s": tokens / run.elapsed_s,
        "ttft_ms": summarize_ms([result.metrics.ttft_s for result in run.results]),
        "tpot_ms": summarize_ms([r.metrics.tpot_s(len(r.token_ids)) for r in run.results if len(r.token_ids) > 1]),
        "e2e_ms": summarize_ms(e2e),
        "returned_ms": summarize_ms(returned),
        "iterations": len(run.iterations),
        "in_iterations_s": run.elapsed_s - between,
        "between_iterations_s": between,
        "foreign_cpu": run.foreign_cpu,
        "own_cpu": run.own_cpu,
    }


def bound_record(measured: Measured, achieved: float) -> dict[str, Any]:
    """What iteration-level scheduling could gain at the costs of these very runs, and how much of it was reached.

    ``achieved``: how many times as many requests a second. ``achieved_at_median_cost``: the same, had each iteration
    that was run taken the median of those with as many rows; other people's work on the machine hardly shows in it.
    """
    config, runs = measured.config, measured.runs
    cost = IterationCost((iteration.n_tokens, iteration.seconds) for run in runs for iteration in run.iterations)
    bound: Bound = bound_of(measured.options.shapes, config.max_batch_size, config.batch_tokens_on("cpu"), cost)
    return {
        "static_s": bound.static_s,
        "arrival_order_s": bound.arrival_order_s,
        "ideal_s": bound.ideal_s,
        "ideal": bound.ideal,
        "arrival_order": bound.arrival_order,
        "achieved": achieved,
        "achieved_at_median_cost": _at_median_cost(runs, "static", cost) / _at_median_cost(runs, "iteration", cost),
        "achieved_of_ideal": achieved / bound.ideal,
        "achieved_of_arrival_order": achieved / bound.arrival_order,
        "iteration_cost": [
            {"rows": rows, "seconds": seconds, "measured": count}
            for rows, seconds, count in zip(cost.rows, cost.seconds, cost.counts, strict=True)
        ],
    }


def _at_median_cost(runs: Sequence[Run], policy: str, cost: IterationCost) -> float:
    """Seconds of a policy's run if nobody had disturbed it: its own iterations and what lay between them."""
    return statistics.median(
        cost.total(iteration.n_tokens for iteration in run.iterations) + _between_s(run)
        for run in runs
        if run.policy == policy
    )


def _between_s(run: Run) -> float:
    """Seconds in which no iteration ran."""
    return run.elapsed_s - sum(iteration.seconds for iteration in run.iterations)


def _workload_record(options: OfflineOptions) -> dict[str, Any]:
    shapes = options.shapes
    return {
        "name": options.workload,
        "requests": len(shapes),
        "shapes": [[shape.n_prompt_tokens, shape.new_tokens] for shape in shapes],
        "input_tokens": sum(shape.n_prompt_tokens for shape in shapes),
        "output_tokens": sum(shape.new_tokens for shape in shapes),
        "seed": options.seed,
    }


def _settings_record(measured: Measured) -> dict[str, Any]:
    config, info = measured.config, measured.info
    return {
        "model": info.model_id,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": config.device,
        "threads": config.threads,
        "batch": config.max_batch_size,
        "max_batch_tokens": config.max_batch_tokens,
        "n_slots": info.n_slots,
        "rounds": measured.options.rounds,
        "clock": measured.options.clock,
    }


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return _without_place(sorted(rows, key=lambda row: int(row["round"])))


def _without_place(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("policy", "round")} for row in rows]


# ---- tables


def tables(record: dict[str, Any]) -> list[Table]:
    """The record for people: rates, latencies, and the bound where both policies were run."""
    from rich.table import Table

    policies: dict[str, Any] = record["policies"]
    ratio: dict[str, Any] | None = record.get("ratios")
    columns = {**policies, **({"ratio": ratio} if ratio else {})}
    rates = Table(box=None, header_style="bold", title_justify="left")
    rates.add_column("")
    for name in columns:
        rates.add_column(name, justify="right")
    for key in ("requests_per_s", "output_tok_per_s", "elapsed_s"):
        rates.add_row(key, *(f"{column[key]:.3f}" for column in columns.values()))
    rates.add_row("foreign_cpu", *(f"{column['foreign_cpu']:.3f}" for column in policies.values()))
    latencies = Table(box=None, header_style="bold")
    for name in ("", "", *_COLUMNS):
        latencies.add_column(name, justify="right" if name else "left")
    for key in LATENCIES:
        for name, column in columns.items():
            digits = 3 if name == "ratio" else 1
            latencies.add_row(key if name == next(iter(columns)) else "", name,
                              *(f"{column[key].get(c, 1.0):.{digits}f}" for c in _COLUMNS))  # fmt: skip
    return [rates, latencies, *([_bound_table(record["bound"])] if "bound" in record else [])]


def _bound_table(bound: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("requests/s, iteration to static", "times", "gain", "achieved of it"):
        table.add_column(name, justify="left" if name.startswith("requests") else "right")
    for name, key in (("ideal: no place ever empty", "ideal"), ("in arrival order", "arrival_order")):
        table.add_row(name, f"{bound[key]:.3f}", f"{bound[key] - 1:+.1%}", f"{bound['achieved_of_' + key]:.1%}")
    for name, key in (("achieved", "achieved"), ("achieved, at median cost", "achieved_at_median_cost")):
        table.add_row(name, f"{bound[key]:.3f}", f"{bound[key] - 1:+.1%}", "")
    return table


def warnings(record: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    worst = max(run["foreign_cpu"] for run in record["runs"])
    if worst <= QUIET:
        return []
    return [f"other processes used up to {worst:.0%} of the CPUs: times are not this engine's alone"]
