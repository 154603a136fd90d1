"""What a comparison says, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from deployment.bench.machine import describe_machine
from deployment.bench.peers.compare import Plan, compared, verdicts
from deployment.bench.peers.engines import Setup
from deployment.bench.peers.settings import Target

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = "orca-serve/bench-peers/1"


def make_record(
    setup: Setup,
    plan: Plan,
    targets: Sequence[Target],
    runs: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    absent: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Machine, settings, every run, the comparisons and the targets, as plain JSON values."""
    comparisons = compared(runs)
    return {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": {
            "model": setup.model, "threads": setup.threads, "batch_tokens": setup.batch_tokens,
            "rounds": plan.rounds, "seed": plan.seed, "fresh": plan.fresh,
        },
        "runs": list(runs),
        "comparisons": comparisons,
        "targets": verdicts(targets, comparisons),
        "failures": list(failures),
        "absent": {name: list(missing) for name, missing in absent.items()},
    }  # fmt: skip


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Comparisons, and the targets that were measured; where there is no peer, ours alone."""
    if not record["comparisons"]:
        return [_alone(record["runs"])]
    measured = [target for target in record["targets"] if target["holds"] is not None]
    return [_comparisons(record["comparisons"]), *([_targets(measured)] if measured else [])]


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "workload", "batch", "metric", "peer", "ours", "theirs", "ours ÷ theirs", "of a round", "foreign CPU"
    )
    for each in sorted(comparisons, key=lambda each: (each["workload"], each["batch"], each["metric"])):
        table.add_row(
            _workload(each), str(each["batch"]), each["metric"], each["peer"], f"{each['ours']:.1f}",
            f"{each['theirs']:.1f}", f"{each['ratio']:.2f}", f"{each['low']:.2f} to {each['high']:.2f}",
            f"{each['foreign_cpu']:.0%}",
        )  # fmt: skip
    return table


def _targets(targets: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("target: ours ÷ theirs", "batch", "metric", "peer", "bound", "ratio", "")
    for each in targets:
        table.add_row(
            each["workload"], str(each["batch"]), each["metric"], each["peer"], each["bound"], f"{each['ratio']:.2f}",
            "holds" if each["holds"] else "missed",
        )  # fmt: skip
    return table


def _alone(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("workload", "batch", "engine", "round", "metrics", "foreign CPU")
    for run in runs:
        metrics = ", ".join(f"{name} {value:.1f}" for name, value in run["metrics"].items())
        table.add_row(
            _workload(run), str(run["batch"]), run["engine"], str(run["round"] + 1), metrics,
            f"{run['foreign_cpu']:.0%}",
        )  # fmt: skip
    return table


def _workload(of: Mapping[str, Any]) -> str:
    return f"{of['workload']}, {of['rate']:g}/s" if of["rate"] else str(of["workload"])


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in ("ours", "theirs", "ratio", "batch") else "left")
    return table
