"""Runners as processes, and what becomes of those that fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from deployment.bench.machine import TreeShares
from deployment.bench.peers.compare import Comparison, Plan
from deployment.bench.peers.engines import Contestant
from deployment.bench.peers.runner import Runner, RunnerError, parse_answer
from deployment.bench.peers.works import Ask, Times, Work

ASKS = [Ask(0.0, [1, 2], 3), Ask(0.5, [4], 1)]
GOOD = [{"first_s": 0.25, "last_s": 1.0, "tokens": 3}, {"first_s": 0.75, "last_s": 0.75, "tokens": 1}]
_ECHO = """
import json, sys
print("loading a model {}")
for line in sys.stdin:
    asked = json.loads(line)["requests"]
    if asked[0]["new_tokens"] == 13:
        sys.exit("no such kernel")
    each = [{"first_s": a["at_s"], "last_s": a["at_s"] + 1, "tokens": a["new_tokens"]} for a in asked]
    print('{"progress": 1}')
    print(json.dumps({"requests": each}), flush=True)
"""


def test_an_answer_is_read() -> None:
    assert parse_answer(json.dumps({"requests": GOOD}), ASKS) == [
        Times(0.0, 0.25, 1.0, 2, 3), Times(0.5, 0.75, 0.75, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("line", ["", "INFO: ready", "[1]", "3", '{"progress": 1}', '{"requests": [}'])
def test_chatter_is_no_answer(line: str) -> None:
    assert parse_answer(line, ASKS) is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"error": "out of memory"}, "out of memory"), ({"requests": GOOD[:1]}, "1 of 2"),
        ({"requests": 7}, "answered for 7"), ({"requests": [GOOD[0], {"first_s": 1}]}, "without"),
        ({"requests": [GOOD[0], None]}, "without"),
        ({"requests": [GOOD[0] | {"tokens": 2}, GOOD[1]]}, "2 tokens where 3"),
        ({"requests": [GOOD[0] | {"last_s": 0.2}, GOOD[1]]}, "out of order"),
        ({"requests": [GOOD[0], GOOD[1] | {"first_s": 0.25}]}, "out of order"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_a_failure(said: dict[str, Any], message: str) -> None:
    with pytest.raises(RunnerError, match=message):
        parse_answer(json.dumps(said), ASKS)


def test_a_process_is_asked_and_ends_with_its_input() -> None:
    with Runner([sys.executable, "-c", _ECHO], {}, 60) as runner:
        assert runner.ask(ASKS) == [Times(0.0, 0.0, 1.0, 2, 3), Times(0.5, 0.5, 1.5, 1, 1)]
        with TreeShares(root=runner.pid) as shares:
            runner.ask(ASKS)
        assert list(shares.seconds) == ["rest"]


def test_a_process_that_ends_says_why() -> None:
    with Runner([sys.executable, "-c", _ECHO], {}, 60) as runner, pytest.raises(RunnerError, match="no such kernel"):
        runner.ask([Ask(0.0, [1], 13)])
    with TreeShares(root=runner.pid) as shares:
        pass
    assert shares.seconds == {}


def test_a_process_that_says_nothing_is_ended() -> None:
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with Runner(silent, {}, 0.0) as runner, pytest.raises(RunnerError, match="no answer within 0 s"):
        runner.ask(ASKS)


def test_a_command_that_is_not_there_is_a_failure() -> None:
    with pytest.raises(RunnerError, match="No such file"):
        Runner(["/nowhere/engine"], {}, 1)


class FakeRunner:
    """Takes a second a token; fails at the ``fails_at``th question. Questions 1 and 2 are the warm-up."""

    pid = 0

    def __init__(self, label: str, log: list[str], fails_at: int = 0) -> None:
        self._label, self._log, self._fails_at, self._asked = label, log, fails_at, 0
        log.append(f"{label} starts")

    def ask(self, asks: Sequence[Ask]) -> list[Times]:
        """As a ``Runner``."""
        self._asked += 1
        if self._asked == self._fails_at:
            raise RunnerError("it broke")
        if self._asked > 2:
            self._log.append(self._label)
        return [
            Times(ask.at_s, ask.at_s + 1, ask.at_s + ask.new_tokens, len(ask.prompt), ask.new_tokens) for ask in asks
        ]

    def close(self) -> None:
        """As a ``Runner``."""
        self._log.append(f"{self._label} ends")


def compare(plan: Plan, fails: dict[str, int] | None = None) -> tuple[Comparison, list[str]]:
    """Ours against ``a`` and ``b``; ``fails``: the question at which one breaks."""
    log: list[str] = []
    contestants = [Contestant(name, "bf16", name == "us", lambda _: []) for name in ("us", "a", "b")]
    comparison = Comparison(
        contestants, plan, lambda _: None,
        lambda contestant, _: FakeRunner(contestant.name, log, (fails or {}).get(contestant.name, 0)), lambda _: None,
    )  # fmt: skip
    comparison.run()
    return comparison, log


def test_all_are_loaded_and_take_turns() -> None:
    comparison, log = compare(Plan((Work("equal_size", 2, 2),), 2))
    assert log == [
        "us starts", "a starts", "b starts", "us", "a", "b", "b", "a", "us", "us ends",
        "a ends", "b ends",
    ]  # fmt: skip
    assert [(run["engine"], run["round"]) for run in comparison.runs] == [
        ("us bf16", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("us bf16", 1),
    ]  # fmt: skip
    assert comparison.runs[0]["metrics"]["output_tok_per_s"] == pytest.approx(2.0)
    assert comparison.failures == []


def test_fresh_ones_are_started_for_every_turn() -> None:
    _, log = compare(Plan((Work("equal_size", 2, 2),), 1, fresh=True))
    assert log == [entry for name in ("us", "a", "b") for entry in (f"{name} starts", name, f"{name} ends")]


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    works = (Work("equal_size", 2, 2), Work("short_long_mix", 2, 2))
    comparison, log = compare(Plan(works, 2), {"a": 4, "b": 2})
    assert comparison.failures == [
        {"engine": "b", "batch": 2, "workload": None, "round": None, "error": "it broke"},
        {"engine": "a", "batch": 2, "workload": "short_long_mix", "round": 0, "error": "it broke"},
    ]
    assert [run["engine"] for run in comparison.runs] == ["us bf16", "a", "us bf16", "us bf16", "us bf16"]
    assert log.count("a ends") == log.count("b ends") == 1


def test_a_peer_that_failed_has_another_chance_at_another_batch_size() -> None:
    comparison, _ = compare(Plan((Work("increment", 1), Work("increment", 2)), 1), {"a": 3})
    assert [failure["batch"] for failure in comparison.failures] == [1, 2]
