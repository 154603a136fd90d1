"""What the serving plane costs: tokens and first tokens at gRPC clients, beside servers with nothing behind them.

Here are the settings and the arithmetic; ``deployment.cli.bench_plane`` starts the services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from deployment.bench.helpers import Helper
from deployment.bench.machine import TreeShares, describe_machine
from deployment.bench.summary import medians, ratios, summarize_ms
from deployment.config import AppConfig

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA: Final = "orca-serve/bench-front/1"
SERVERS: Final = ("bare", "plain", "orca")
"""A bare ``grpc.aio`` server; two plain Serve deployments; this product with an engine without a model."""
FIRST_TOKEN_TOKENS: Final = 2
FEWEST_TOKENS: Final = 4096
"""Of a run."""
TARGET_RATIO: Final = 0.6
TARGET_ADDED_MS: Final = 5.0


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """``streams``: at once, one run each. ``tokens``: of a stream. ``rounds``: how often every server is measured.

    ``rate``: tokens a second that the engines make together at most; 0 = as many as they can. ``first_tokens``:
    requests, one at a time, that are asked for their first token in a round.
    """

    streams: tuple[int, ...]
    replicas: tuple[int, ...]
    tokens: int
    rounds: int
    rate: float
    first_tokens: int
    plain_proxy: bool


@dataclass(frozen=True, slots=True)
class Target:
    """Where clients find a server. ``address``: host and port; ``application``: of the servers that share a port."""

    name: str
    address: str
    application: str = ""


def front_arguments(options: FrontOptions, n_replicas: int) -> dict[str, Any]:
    """The ``AppConfig`` to measure: room for all streams in every replica, so that nobody waits in line."""
    most = max(options.streams)
    arguments: dict[str, Any] = {
        "engine": {
            "device": "cpu",
            "max_batch_size": most,
            "max_batch_tokens": max(512, 32 * most),
            "n_slots": most * (options.tokens + 64),
        },
        "replicas": {"min": n_replicas, "max": n_replicas, "num_cpus": 1},
        "limits": {"max_stream_backlog": max(4096, options.tokens), "max_waiting_requests": most},
        "drain": {"timeout_s": 1},
    }
    AppConfig.parse(arguments)
    return arguments


def measure(
    options: FrontOptions, n_replicas: int, load: Helper, targets: Sequence[Target], roles: dict[int, str],
    say: Callable[[str], object],
) -> list[dict[str, Any]]:  # fmt: skip
    """All rounds against servers that are up, in turns; the order turns with every round. Everything is warmed up."""
    for target in targets:
        _ask(load, target, max(options.streams), 16, 1)
    runs = []
    for number in range(options.rounds):
        for n_streams in options.streams:
            for target in _turned(targets, number):
                say(
                    f"{n_replicas} replicas, round {number + 1} of {options.rounds}: {n_streams} streams, {target.name}"
                )
                with TreeShares(roles) as shares:
                    said = _ask(load, target, n_streams, options.tokens, _repeat(options, n_streams))
                place = {"server": target.name, "replicas": n_replicas, "streams": n_streams, "round": number}
                runs.append(place | throughput(said, shares))
        for target in _turned(targets, number):
            say(f"{n_replicas} replicas, round {number + 1} of {options.rounds}: first tokens, {target.name}")
            with TreeShares(roles) as shares:
                said = _ask(load, target, 1, FIRST_TOKEN_TOKENS, options.first_tokens)
            place = {"server": target.name, "replicas": n_replicas, "streams": 0, "round": number}
            first = {"first_token_ms": summarize_ms(said["first_token_s"])}
            runs.append(place | first | {"foreign_cpu": shares.foreign, "own_cpu": shares.own})
    return runs


def _repeat(options: FrontOptions, n_streams: int) -> int:
    """Few streams have few tokens: enough of them, one after the other, to last a while."""
    return max(1, round(FEWEST_TOKENS / (n_streams * options.tokens)))


def _turned(targets: Sequence[Target], number: int) -> Sequence[Target]:
    start = number % len(targets)
    return [*targets[start:], *targets[:start]]


def _ask(load: Helper, target: Target, streams: int, tokens: int, repeat: int) -> dict[str, Any]:
    return load.ask(
        address=target.address, application=target.application, streams=streams, tokens=tokens, repeat=repeat
    )


def throughput(said: dict[str, Any], shares: TreeShares) -> dict[str, Any]:
    """One run. ``client_core``: part of one core that the clients used; near 1 they are what limits the run.

    ``cpu_us``: microseconds on CPUs for each token, by what the process is for.
    """
    tokens, elapsed = said["tokens"], said["elapsed_s"]
    return {
        "elapsed_s": elapsed,
        "tokens_per_s": tokens / elapsed,
        "messages_per_s": said["messages"] / elapsed,
        "tokens_per_message": tokens / said["messages"],
        "first_token_ms": summarize_ms(said["first_token_s"]),
        "client_core": said["cpu_s"] / elapsed,
        "cpu_us": {role: 1e6 * seconds / tokens for role, seconds in sorted(shares.seconds.items())},
        "foreign_cpu": shares.foreign,
        "own_cpu": shares.own,
    }


def make_record(options: FrontOptions, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Machine, settings, every run, and for every number of replicas and streams a ``summary``.

    ``to_bare``, ``to_plain`` of a summary: ours to theirs, the median over the rounds of the ratio within a round; of
    first tokens (``streams`` 0) ``added_ms``: ours less the bare server's.
    """
    cases = dict.fromkeys((run["replicas"], run["streams"]) for run in runs)
    return {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(options),
        "machine": describe_machine(),
        "runs": list(runs),
        "summary": [_summary(runs, *case) for case in cases],
    }


def _summary(runs: Sequence[dict[str, Any]], n_replicas: int, n_streams: int) -> dict[str, Any]:
    mine = [run for run in runs if (run["replicas"], run["streams"]) == (n_replicas, n_streams)]
    by_server = {name: _of_server(mine, name) for name in SERVERS}
    found: dict[str, Any] = {"replicas": n_replicas, "streams": n_streams}
    found |= {name: medians(rows) for name, rows in by_server.items()}
    if n_streams == 0:
        pairs = zip(by_server["orca"], by_server["bare"], strict=True)
        found["added_ms"] = medians([_difference(o["first_token_ms"], b["first_token_ms"]) for o, b in pairs])
        return found
    for name in ("bare", "plain"):
        pairs = zip(by_server["orca"], by_server[name], strict=True)
        found[f"to_{name}"] = medians([ratios(_rates(ours), _rates(theirs)) for ours, theirs in pairs])
    return found


def _of_server(runs: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    rows = sorted((run for run in runs if run["server"] == name), key=lambda run: int(run["round"]))
    return [{k: v for k, v in row.items() if k not in ("server", "replicas", "streams", "round")} for row in rows]


def _rates(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("tokens_per_s", "messages_per_s")}


def _difference(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one[name] - other[name] for name in one}


# ---- for people


def tables(record: dict[str, Any]) -> list[Table]:
    """Rates, their ratios, then first tokens."""
    rates = _table("replicas", "streams", "server", "tokens/s", "messages/s", "tok/msg", "clients", "foreign")
    ratios = _table("replicas", "streams", "tokens to bare", "messages to bare", "tokens to plain")
    first = _table("replicas", "server", "first token, ms: p50", "p99", "added: p50", "p99", "foreign")
    for case in record["summary"]:
        _add_case(case, rates, first)
        if case["streams"]:
            to_bare, to_plain = case["to_bare"], case["to_plain"]
            ratios.add_row(
                str(case["replicas"]), str(case["streams"]), f"{to_bare['tokens_per_s']:.3f}",
                f"{to_bare['messages_per_s']:.3f}", f"{to_plain['tokens_per_s']:.2f}",
            )  # fmt: skip
    return [rates, ratios, first]


def _add_case(case: dict[str, Any], rates: Table, first: Table) -> None:
    """One row a server, in one of the two."""
    for server in SERVERS:
        row = case[server]
        where = (str(case["replicas"]), str(case["streams"])) if server == SERVERS[0] else ("", "")
        foreign = f"{row['foreign_cpu']:.0%}"
        if case["streams"] == 0:
            ms, added = row["first_token_ms"], case["added_ms"]
            more = (f"{added['p50']:.2f}", f"{added['p99']:.2f}") if server == "orca" else ("", "")
            first.add_row(where[0], server, f"{ms['p50']:.2f}", f"{ms['p99']:.2f}", *more, foreign)
        else:
            rates.add_row(
                *where, server, f"{row['tokens_per_s']:.0f}", f"{row['messages_per_s']:.0f}",
                f"{row['tokens_per_message']:.2f}", f"{row['client_core']:.2f}", foreign,
            )  # fmt: skip


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == "server" else "right")
    return table
