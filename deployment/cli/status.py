"""``orca-serve status``."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deployment.cli.prompting import Address, ApiKey

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deployment.serving import ServiceStatus

_REDRAW_S: Final = 1.0


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw in place until Ctrl-C.")] = False,
    address: Address = "127.0.0.1:9000",
    api_key: ApiKey = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.", min=0.1)] = 10.0,
) -> None:
    """Replicas, slots, queue, headroom and rates."""
    from rich.console import Console
    from rich.live import Live

    from deployment.client import OrcaClient

    with OrcaClient(address, api_key) as client:
        now = client.status(timeout_s=timeout)
        if not watch:
            if as_json:
                typer.echo(json.dumps(_body(now)))
            else:
                Console().print(_table(now, None, 0.0))
            return
        try:
            if as_json:
                while True:
                    typer.echo(json.dumps(_body(now)))
                    time.sleep(_REDRAW_S)
                    now = client.status(timeout_s=timeout)
            with Live(_table(now, None, 0.0), auto_refresh=False) as live:
                seen_at = time.monotonic()
                while True:
                    time.sleep(_REDRAW_S)
                    before, now = now, client.status(timeout_s=timeout)
                    elapsed, seen_at = time.monotonic() - seen_at, time.monotonic()
                    live.update(_table(now, before, elapsed), refresh=True)
        except KeyboardInterrupt:
            return


def _body(status: ServiceStatus) -> dict[str, Any]:
    body = dataclasses.asdict(status)
    for replica, source in zip(body["replicas"], status.replicas, strict=True):
        replica["load"] |= {"headroom": source.load.headroom, "unused_slots": source.load.unused_slots}
    return body


def _table(now: ServiceStatus, before: ServiceStatus | None, elapsed_s: float) -> RenderableType:
    """One row a replica. Rates need two readings ``elapsed_s`` seconds apart."""
    from rich.table import Table

    line = f"waiting {now.waiting_requests} requests, {now.waiting_slots} slots"
    title = f"{now.model.model_id}  {_state(now)}  {line}"
    plain: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", caption=_notes(now), caption_justify="left", **plain)
    table.add_column("replica", no_wrap=True)
    for name in ("slots", "reserved", "used", "headroom", "queued", "running", "waiting", "tokens/s", "age s"):
        table.add_column(name, justify="right", no_wrap=True)
    old = {} if before is None else {entry.replica: entry.load for entry in before.replicas}
    for entry in now.replicas:
        load, previous = entry.load, old.get(entry.replica)
        rate = "-"
        if previous is not None and elapsed_s > 0:
            rate = f"{max(0, load.generated_tokens - previous.generated_tokens) / elapsed_s:.1f}"
        table.add_row(
            f"{entry.replica} (silent)" if entry.silent else entry.replica,
            *(str(n) for n in (load.n_slots, load.reserved_slots, load.used_slots, load.headroom, load.queued_slots)),
            *(str(n) for n in (load.running, load.waiting)),
            rate,
            f"{entry.report_age_s:.1f}",
        )
    for kind, n in _unseen(now):
        table.add_row(f"{n} {kind}", *("-" for _ in range(9)))
    return table


def _state(now: ServiceStatus) -> str:
    """Whether anybody serves and, if not, what has to happen first."""
    if now.draining:
        return "draining"
    if now.replicas:
        return "ready"
    starting = 0 if now.deployed is None else now.deployed.starting
    if starting:
        return f"no replica ready, {starting} starting"
    if now.scaling is not None and now.scaling.target == 0:
        return "zero replicas: the next request starts one"
    return "no replica ready"


def _unseen(now: ServiceStatus) -> list[tuple[str, int]]:
    """Replicas that say nothing: they wait for room, load the model, or end."""
    counts = now.deployed
    if counts is None:
        return []
    return [(kind, n) for kind, n in (("starting", counts.starting), ("stopping", counts.stopping)) if n]


def _notes(now: ServiceStatus) -> str | None:
    """What does not fit in the rows: ingresses that are missing, and why there are as many replicas as there are."""
    notes = []
    if now.ingresses_answered < now.ingresses_known:
        notes.append(
            f"{now.ingresses_answered} of {now.ingresses_known} ingresses answered: line and totals are theirs"
        )
    if now.deployed is not None and now.deployed.message:
        notes.append(f"Serve: {now.deployed.message}")
    scaling = now.scaling
    if scaling is not None:
        notes.append(f"scaling, {scaling.age_s:.0f} s ago: {scaling.reason} ({scaling.actual} running)")
        if scaling.last_change:
            notes.append(f"last change, {scaling.last_change_age_s:.0f} s ago: {scaling.last_change}")
    return "\n".join(notes) or None
