"""What the service costs a real model: tokens a second through everything, against the engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from deployment.bench.helpers import Helper
from deployment.bench.machine import TreeShares, describe_machine
from deployment.bench.summary import medians
from deployment.config import AppConfig
from orca_core.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = "orca-serve/bench-tax/1"
TARGET_RATIO: Final = 0.90
_WARMUP_TOKENS: Final = 8
_PROMPT_ROOM: Final = 64


@dataclass(frozen=True, slots=True)
class TaxOptions:
    """``streams`` at once, ``tokens`` of each; ``threads``: torch threads, of the replica as of the engine alone."""

    streams: int
    tokens: int
    rounds: int
    threads: int
    model: str
    plain_proxy: bool


def tax_arguments(options: TaxOptions) -> dict[str, Any]:
    """The ``AppConfig`` to measure: one replica that takes all streams at once."""
    return {
        "model": {"source": options.model},
        "engine": {
            "device": "cpu",
            "max_batch_size": options.streams,
            "n_slots": options.streams * (options.tokens + _PROMPT_ROOM),
            "threads": options.threads,
        },
        "replicas": {"min": 1, "max": 1, "num_cpus": options.threads},
        "drain": {"timeout_s": 1},
    }


def alone_config(options: TaxOptions) -> EngineConfig:
    """The very configuration the replica has."""
    return AppConfig.parse(tax_arguments(options)).engine_config()


def measure_tax(
    options: TaxOptions, load: Helper, alone: Helper, address: str, roles: dict[int, str], say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """All rounds, after a short run of both; they take turns, and who is first turns with every round."""
    config = asdict(alone_config(options))

    def through(tokens: int) -> dict[str, Any]:
        return load.ask(address=address, application="", streams=options.streams, tokens=tokens, repeat=1)

    def engine(tokens: int) -> dict[str, Any]:
        return alone.ask(config=config, streams=options.streams, tokens=tokens)

    ways = (("alone", engine), ("service", through))
    for _, way in ways:
        way(_WARMUP_TOKENS)
    runs = []
    for number in range(options.rounds):
        for name, way in ways if number % 2 == 0 else ways[::-1]:
            say(f"round {number + 1} of {options.rounds}: {name}")
            with TreeShares(roles) as shares:
                said = way(options.tokens)
            cpu_us = {role: 1e6 * seconds / said["tokens"] for role, seconds in sorted(shares.seconds.items())}
            runs.append({
                "way": name, "round": number, "tokens_per_s": said["tokens"] / said["elapsed_s"],
                "elapsed_s": said["elapsed_s"], "cpu_us": cpu_us, "foreign_cpu": shares.foreign,
                "own_cpu": shares.own,
            })  # fmt: skip
    return runs


def make_tax_record(options: TaxOptions, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Machine, settings, every run, medians, and ``ratio``: service to engine alone, the median over the rounds."""
    by_way = {
        way: [{k: v for k, v in run.items() if k not in ("way", "round")} for run in in_order if run["way"] == way]
        for in_order in [sorted(runs, key=lambda run: int(run["round"]))]
        for way in ("alone", "service")
    }
    pairs = zip(by_way["service"], by_way["alone"], strict=True)
    return {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(options),
        "machine": describe_machine(),
        "runs": list(runs),
        "alone": medians(by_way["alone"]),
        "service": medians(by_way["service"]),
        "ratio": medians([{"of": s["tokens_per_s"] / a["tokens_per_s"]} for s, a in pairs])["of"],
    }


def tax_tables(record: dict[str, Any]) -> list[Table]:
    """One row a way."""
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("", "tokens/s", "ratio", "foreign CPU"):
        table.add_column(name, justify="right" if name else "left")
    for way, name in (("alone", "engine alone"), ("service", "through the service")):
        row = record[way]
        ratio = f"{record['ratio']:.3f}" if way == "service" else ""
        table.add_row(name, f"{row['tokens_per_s']:.1f}", ratio, f"{row['foreign_cpu']:.0%}")
    return [table]
