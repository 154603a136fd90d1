"""What peers are asked, and the arithmetic of what comes back."""

from __future__ import annotations

import pytest

from deployment.bench.peers.compare import compared, in_turn, verdicts
from deployment.bench.peers.settings import Target
from deployment.bench.peers.works import Times, Work, increment_ms, measure, median_metrics, poisson_trace, warmups


def run(engine: str, number: int, value: float, **other: object) -> dict[str, object]:
    """A record of one turn of ``equal_size`` at batch 16."""
    record = {"engine": engine, "precision": "bf16", "is_ours": engine.startswith("orca"), "workload": "equal_size",
              "rate": 0.0, "batch": 16, "round": number, "foreign_cpu": 0.0, "own_cpu": 1.0}  # fmt: skip
    return record | {"metrics": {"output_tok_per_s": value, "increment_ms": value}} | other


def test_work_has_fixed_lengths() -> None:
    lengths = {
        work.name: [(len(ask.prompt), ask.new_tokens) for ask in work.asks(1000, 0)]
        for work in (
            Work("increment", 3),
            Work("initiation", 8),
            Work("equal_size", 2, 3),
            Work("short_long_mix", 2, 3),
        )
    }
    assert lengths == {
        "increment": [(128, 64)] * 3, "initiation": [(512, 1)], "equal_size": [(128, 128)] * 3,
        "short_long_mix": [(32, 32), (512, 128), (32, 32)],
    }  # fmt: skip
    assert [len(asks) for asks in warmups(4, 100)] == [4, 1]


def test_prompts_differ_from_round_to_round_and_not_from_engine_to_engine() -> None:
    work = Work("equal_size", 2, 4)
    assert work.asks(1000, 1) == work.asks(1000, 1)
    assert not {tuple(ask.prompt) for ask in work.asks(1000, 1)} & {tuple(ask.prompt) for ask in work.asks(1000, 2)}
    assert all(0 <= token < 50 for ask in work.asks(50, 0) for token in ask.prompt)


def test_the_trace_is_the_papers() -> None:
    slow, fast = poisson_trace(2000, 1.0, 1000, 0), poisson_trace(2000, 4.0, 1000, 1)
    assert all(32 <= len(ask.prompt) <= 512 and 1 <= ask.new_tokens <= 128 for ask in slow)
    assert slow[-1].at_s == pytest.approx(2000, rel=0.1)
    assert [ask.at_s for ask in fast] == pytest.approx([ask.at_s / 4 for ask in slow])
    assert [(len(ask.prompt), ask.new_tokens) for ask in fast] == [(len(ask.prompt), ask.new_tokens) for ask in slow]
    assert fast[0].prompt != slow[0].prompt
    assert Work("trace", 16, 5, 2.0).asks(1000, 0) == poisson_trace(5, 2.0, 1000, 0)


def test_an_increment_counts_from_the_last_first_token() -> None:
    times = [Times(0.0, 1.0, 2.0, 128, 64), Times(0.0, 1.37, 2.0, 128, 64)]
    assert increment_ms(times) == pytest.approx(10.0)
    for hopeless in ([Times(0.0, 1.0, 1.0, 8, 1)], [Times(0.0, 1.0, 1.0, 8, 4)]):
        with pytest.raises(ValueError, match="no increment"):
            increment_ms(hopeless)


def test_latencies_count_from_the_arrival_and_the_rate_from_the_first_of_them() -> None:
    times = [Times(1.0, 1.5, 3.0, 8, 10), Times(2.0, 3.5, 5.0, 8, 30)]
    found = measure(Work("trace", 2, 2, 1.0), times)
    assert found == pytest.approx({
        "output_tok_per_s": 10.0, "requests_per_s": 0.5, "ttft_ms": 1000, "ttft_p95_ms": 1450, "e2e_ms": 2500,
        "e2e_p95_ms": 2950,
    })  # fmt: skip
    assert measure(Work("initiation", 1), times[:1]) == {"initiation_ms": 500.0}
    assert measure(Work("increment", 1), times[:1]) == pytest.approx({"increment_ms": 1500 / 9})
    with pytest.raises(ValueError, match="no time"):
        measure(Work("equal_size", 1), [Times(0.0, 0.0, 0.0, 8, 1)])


def test_a_turn_is_the_median_of_its_repeats() -> None:
    assert Work("increment", 1).repeats == Work("initiation", 1).repeats == 3
    assert Work("equal_size", 1).repeats == 1
    assert median_metrics([{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]) == {"x": 2.0}


def test_the_order_turns_with_every_round() -> None:
    assert [in_turn(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"],
    ]  # fmt: skip


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    """The machine was twice as fast in the last round: that changes no ratio, and would one of medians."""
    runs = [
        run("peer", 0, 100.0), run("orca-serve bf16", 0, 150.0), run("orca-serve bf16", 1, 200.0, foreign_cpu=0.2),
        run("peer", 1, 100.0), run("peer", 2, 200.0), run("orca-serve bf16", 2, 320.0),
    ]  # fmt: skip
    (found,) = compared(runs)
    assert found == {
        "peer": "peer", "workload": "equal_size", "rate": 0.0, "batch": 16, "metric": "output_tok_per_s", "ours": 200.0,
        "theirs": 100.0, "ratio": 1.6, "low": 1.5, "high": 2.0, "rounds": 3, "foreign_cpu": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("other", [{"precision": "int8"}, {"batch": 8}, {"round": 1}, {"workload": "increment"},
                                   {"rate": 2.0}])  # fmt: skip
def test_only_the_same_turn_is_compared(other: dict[str, object]) -> None:
    assert compared([run("orca-serve bf16", 0, 2.0), run("peer", 0, 1.0, **other)]) == []


def test_a_round_that_one_of_them_has_not_is_left_out() -> None:
    (found,) = compared([run("orca-serve bf16", 0, 3.0), run("orca-serve bf16", 1, 9.0), run("peer", 0, 1.0)])
    assert (found["ratio"], found["rounds"], found["ours"]) == (3.0, 1, 3.0)


def test_targets_are_bounds_on_ours_to_theirs() -> None:
    rate = {"peer": "a", "workload": "equal_size", "metric": "output_tok_per_s", "batch": 16, "ratio": 1.5}
    slow, fast = (rate | {"workload": "trace", "metric": "e2e_ms", "ratio": ratio} for ratio in (0.8, 0.7))
    targets = [
        Target("a", "equal_size", "output_tok_per_s", 16, at_least=1.5),
        Target("a", "equal_size", "output_tok_per_s", 16, at_least=1.6),
        Target("a", "equal_size", "output_tok_per_s", 8, at_least=1.0),
        Target("a", "trace", "e2e_ms", 16, at_most=0.7),
    ]
    found = [(each["bound"], each["ratio"], each["holds"]) for each in verdicts(targets, [rate, slow, fast])]
    assert found == [("≥ 1.5", 1.5, True), ("≥ 1.6", 1.5, False), ("≥ 1", None, None), ("≤ 0.7", 0.8, False),
                     ("≤ 0.7", 0.7, True)]  # fmt: skip
