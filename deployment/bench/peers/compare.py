"""Rounds in which the engines take turns, the ratios within a round, and which targets hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from deployment.bench.machine import TreeShares
from deployment.bench.peers.engines import Contestant
from deployment.bench.peers.runner import Runner, RunnerError
from deployment.bench.peers.settings import Target
from deployment.bench.peers.works import HEADLINES, Ask, Times, Work, measure, median_metrics, warmups

_PAUSE_S: Final = 0.5
"""Between two turns: threads of the engine before may still be spinning."""
_ROUND_SEED: Final = 1000


class AnyRunner(Protocol):
    """What is needed of a ``Runner``."""

    @property
    def pid(self) -> int:
        """Its process."""

    def ask(self, asks: Sequence[Ask]) -> list[Times]:
        """See ``Runner``."""

    def close(self) -> None:
        """See ``Runner``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``fresh``: every turn starts its engine anew; else all of a batch size are loaded and wait for their turns."""

    works: tuple[Work, ...]
    rounds: int
    seed: int = 0
    vocab_size: int = 32_000
    timeout_s: float = 600.0
    fresh: bool = False


def in_turn(labels: Sequence[str], number: int) -> list[str]:
    """The order in a round: it turns with every round, so that a machine that gets slower or faster harms none."""
    return list(labels if number % 2 == 0 else labels[::-1])


class Comparison:
    """``run`` fills ``runs`` (a record a turn) and ``failures``; an engine that fails is left out at that batch size.

    ``start``: makes a runner; ``pause``: called between turns, with seconds.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        plan: Plan,
        say: Callable[[str], object],
        start: Callable[[Contestant, int], AnyRunner] | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._by_label = {contestant.label: contestant for contestant in contestants}
        self._plan = plan
        self._say = say
        self._start = start or self._start_process
        self._pause = pause
        self._open: dict[str, AnyRunner] = {}
        self.runs: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    def run(self) -> None:
        """Everything, one batch size after the other."""
        for batch in sorted({work.batch for work in self._plan.works}):
            works = [work for work in self._plan.works if work.batch == batch]
            with ExitStack() as stack:
                stack.callback(self._close_all)
                self._run_batch(batch, works)

    def _run_batch(self, batch: int, works: Sequence[Work]) -> None:
        labels = list(self._by_label)
        if not self._plan.fresh:
            labels = [label for label in labels if self._try(label, batch, None, None, self._open_one)]
        for number in range(self._plan.rounds):
            for work in works:
                for label in in_turn(labels, number):
                    self._say(f"batch {batch}, round {number + 1} of {self._plan.rounds}: {work.key}, {label}")
                    if not self._try(label, batch, work, number, self._turn):
                        labels.remove(label)

    def _try(
        self, label: str, batch: int, work: Work | None, number: int | None, action: Callable[..., object]
    ) -> bool:
        try:
            action(label, batch, work, number)
        except (RunnerError, ValueError) as error:
            self._say(f"{label} failed: {error}")
            self.failures.append({"engine": label, "batch": batch, "workload": work.key if work else None,
                                  "round": number, "error": str(error)})  # fmt: skip
            self._close(label)
            return False
        return True

    def _open_one(self, label: str, batch: int, _work: Work | None = None, _number: int | None = None) -> None:
        self._say(f"batch {batch}: starting {label}")
        runner = self._start(self._by_label[label], batch)
        self._open[label] = runner
        for asks in warmups(batch, self._plan.vocab_size):
            runner.ask(asks)

    def _turn(self, label: str, batch: int, work: Work, number: int) -> None:
        if self._plan.fresh:
            self._open_one(label, batch)
        runner, plan = self._open[label], self._plan
        seeds = [plan.seed + _ROUND_SEED * number + repeat for repeat in range(work.repeats)]
        all_asks = [work.asks(plan.vocab_size, seed) for seed in seeds]
        self._pause(_PAUSE_S)
        with TreeShares(root=runner.pid) as shares:
            answers = [runner.ask(asks) for asks in all_asks]
        contestant = self._by_label[label]
        self.runs.append({
            "engine": label, "precision": contestant.precision, "is_ours": contestant.is_ours, "workload": work.name,
            "rate": work.rate, "batch": batch, "round": number, "foreign_cpu": shares.foreign, "own_cpu": shares.own,
            "metrics": median_metrics(measure(work, times) for times in answers),
        })  # fmt: skip
        if plan.fresh:
            self._close(label)

    def _start_process(self, contestant: Contestant, batch: int) -> AnyRunner:
        return Runner(contestant.argv(batch), contestant.env, self._plan.timeout_s)

    def _close(self, label: str) -> None:
        runner = self._open.pop(label, None)
        if runner is not None:
            runner.close()

    def _close_all(self) -> None:
        for label in list(self._open):
            self._close(label)


def compared(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours divided by each peer of the same precision, for all that is compared; in the order of the runs.

    ``ratio``: the median over the rounds that both have; ``low``, ``high``: the least and the greatest of a round.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for peer_run in (run for run in runs if not run["is_ours"]):
        ours = [run for run in runs if run["is_ours"] and _same_turn(run, peer_run)]
        for metric in HEADLINES[peer_run["workload"]] if ours else ():
            key = (peer_run["engine"], peer_run["workload"], peer_run["rate"], peer_run["batch"], metric)
            entry = found.setdefault(key, {"ratios": [], "ours": [], "peers": [], "foreign": 0.0})
            mine, theirs = ours[0]["metrics"][metric], peer_run["metrics"][metric]
            entry["ratios"].append(mine / theirs)
            entry["ours"].append(mine)
            entry["peers"].append(theirs)
            entry["foreign"] = max(entry["foreign"], ours[0]["foreign_cpu"], peer_run["foreign_cpu"])
    return [
        {
            **dict(zip(("peer", "workload", "rate", "batch", "metric"), key, strict=True)),
            "ours": statistics.median(entry["ours"]), "theirs": statistics.median(entry["peers"]),
            "ratio": statistics.median(entry["ratios"]), "low": min(entry["ratios"]), "high": max(entry["ratios"]),
            "rounds": len(entry["ratios"]), "foreign_cpu": entry["foreign"],
        }
        for key, entry in found.items()
    ]  # fmt: skip


def _same_turn(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("precision", "workload", "rate", "batch", "round"))


def verdicts(targets: Sequence[Target], comparisons: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each target with the ratio it speaks of, and whether it ``holds``; both ``None`` where nothing was measured.

    A target of the trace speaks of every rate that was offered.
    """
    result = []
    for target in targets:
        names = (target.peer, target.workload, target.metric, target.batch)
        ratios = [
            each["ratio"]
            for each in comparisons
            if (each["peer"], each["workload"], each["metric"], each["batch"]) == names
        ]
        result += [
            {**asdict(target), "bound": target.bound, "ratio": ratio,
             "holds": None if ratio is None else target.holds(ratio)}
            for ratio in ratios or [None]
        ]  # fmt: skip
    return result
