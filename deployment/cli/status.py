"""``orca-serve status``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from deployment.cli.prompting import Address, ApiKey, connected

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deployment.serving import ReplicaStatus, ServiceStatus

_REDRAW_S: Final = 1.0
_NO_WIDTH: Final = 100_000
_FRESH_S: Final = 2.0
"""A replica is asked for so long. Of one that did not answer and told something since, Serve has taken it out."""

_Frame: TypeAlias = "tuple[ServiceStatus, ServiceStatus | None, float]"
"""What there is now, what there was before, and the seconds between them."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again until Ctrl-C: in place, where it is a terminal.")
    ] = False,
    address: Address = "127.0.0.1:9000",
    api_key: ApiKey = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.", min=0.1)] = 10.0,
) -> None:
    """Replicas, slots, queue, headroom and rates."""
    with connected(address, api_key) as client:
        frames = islice(_frames(lambda: client.status(timeout_s=timeout)), None if watch else 1)
        try:
            if as_json:
                for now, _, _ in frames:
                    typer.echo(json.dumps(_body(now)))
            else:
                _show(frames, watch)
        except KeyboardInterrupt:
            if not watch:
                raise


def _frames(read: Callable[[], ServiceStatus]) -> Iterator[_Frame]:
    now, seen_at = read(), time.monotonic()
    yield now, None, 0.0
    while True:
        time.sleep(_REDRAW_S)
        before, now = now, read()
        elapsed_s, seen_at = time.monotonic() - seen_at, time.monotonic()
        yield now, before, elapsed_s


def _show(frames: Iterable[_Frame], in_place: bool) -> None:
    """On a terminal ``in_place``, else one below the other, and no line is folded for a reader that has no width."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console.width = _NO_WIDTH
    elif in_place and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for frame in frames:
                live.update(_page(*frame), refresh=True)
        return
    for number, frame in enumerate(frames):
        if number:
            console.print()
        console.print(_page(*frame))


def _body(status: ServiceStatus) -> dict[str, Any]:
    body = dataclasses.asdict(status)
    for replica, source in zip(body["replicas"], status.replicas, strict=True):
        replica["load"] |= {"headroom": source.load.headroom, "unused_slots": source.load.unused_slots}
    return body


def _page(now: ServiceStatus, before: ServiceStatus | None, elapsed_s: float) -> RenderableType:
    """A line about the whole, a row a replica, and notes: lines have the width there is, not that of the rows."""
    from rich.console import Group
    from rich.text import Text

    line = f"waiting {now.waiting_requests} requests, {now.waiting_slots} slots"
    title = Text(f"{now.model.model_id}  {_state(now)}  {line}", "table.title")
    return Group(title, _table(now, before, elapsed_s), *(Text(note, "table.caption") for note in _notes(now)))


def _table(now: ServiceStatus, before: ServiceStatus | None, elapsed_s: float) -> RenderableType:
    """One row a replica. Rates need two readings ``elapsed_s`` seconds apart."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
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
            _name(entry, now),
            *(str(n) for n in (load.n_slots, load.reserved_slots, load.used_slots, load.headroom, load.queued_slots)),
            *(str(n) for n in (load.running, load.waiting)),
            rate,
            f"{entry.report_age_s:.1f}",
        )
    for kind, n in _unseen(now):
        table.add_row(f"{n} {kind}", *("-" for _ in range(9)))
    return table


def _name(entry: ReplicaStatus, now: ServiceStatus) -> str:
    if _leaves(entry, now):
        return f"{entry.replica} (leaving)"
    return f"{entry.replica} (silent)" if entry.silent else entry.replica


def _leaves(entry: ReplicaStatus, now: ServiceStatus) -> bool:
    """Whether Serve has taken it out: it is asked nothing any more, and its streams go on and tell of it."""
    stops = now.deployed is None or now.deployed.stopping > 0
    return entry.silent and entry.report_age_s < _FRESH_S and stops


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
    stopping = counts.stopping - sum(_leaves(entry, now) for entry in now.replicas)
    return [(kind, n) for kind, n in (("starting", counts.starting), ("stopping", stopping)) if n > 0]


def _notes(now: ServiceStatus) -> list[str]:
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
    return notes
