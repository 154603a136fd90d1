"""Workloads and arithmetic."""

from __future__ import annotations

import pytest

from deployment.bench.summary import medians, percentile, ratios, summarize_ms
from deployment.bench.workloads import Shape, random_prompts, shapes_of


def test_the_workloads_are_those_of_tinyorca() -> None:
    assert shapes_of("equal_size", 16) == [Shape(128, 128)] * 16
    mix = shapes_of("short_long_mix", 16)
    assert mix == [Shape(32, 32), Shape(512, 128)] * 8
    assert sum(shape.n_prompt_tokens for shape in mix) == 4352
    assert sum(shape.new_tokens for shape in mix) == 1280
    assert shapes_of("short_long_mix", 3) == [Shape(32, 32), Shape(512, 128), Shape(32, 32)]
    assert Shape(512, 128).total_tokens == 640


def test_prompts_are_the_same_for_a_seed_and_share_no_prefix() -> None:
    shapes = shapes_of("short_long_mix", 16)
    prompts = random_prompts(shapes, 1000, 5)
    assert prompts == random_prompts(shapes, 1000, 5) != random_prompts(shapes, 1000, 6)
    assert [len(prompt) for prompt in prompts] == [shape.n_prompt_tokens for shape in shapes]
    assert all(0 <= token_id < 1000 for prompt in prompts for token_id in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 16


@pytest.mark.parametrize(
    ("values", "quantile", "expected"),
    [([7.0], 0.99, 7.0), ([1, 2, 3, 4], 0.5, 2.5), ([4, 1, 3, 2], 0.95, 3.85), ([10, 20], 0.25, 12.5),
     ([1, 2, 3], 0.0, 1.0), ([1, 2, 3], 1.0, 3.0)],
)  # fmt: skip
def test_percentiles_are_interpolated(values: list[float], quantile: float, expected: float) -> None:
    assert percentile(values, quantile) == pytest.approx(expected)


def test_a_summary_is_in_milliseconds() -> None:
    assert summarize_ms([0.1, 0.2, 0.3]) == pytest.approx({"mean": 200, "p50": 200, "p95": 290, "p99": 298})
    assert summarize_ms([]) == {"mean": 0, "p50": 0, "p95": 0, "p99": 0}


def test_medians_and_ratios_go_into_mappings_and_leave_out_the_rest() -> None:
    records = [{"x": 1.0, "deep": {"y": 10}, "name": "a"}, {"x": 5.0, "deep": {"y": 30}, "name": "b"},
               {"x": 2.0, "deep": {"y": 20}, "name": "c"}]  # fmt: skip
    assert medians(records) == {"x": 2.0, "deep": {"y": 20}}
    assert ratios({"x": 3.0, "deep": {"y": 5}, "z": 1}, {"x": 2.0, "deep": {"y": 10}, "z": 0, "w": 1}) == {
        "x": 1.5, "deep": {"y": 0.5},
    }  # fmt: skip


def test_what_not_all_records_have_has_no_median() -> None:
    """A ratio to nothing is left out, and on a quiet machine others use nothing in some rounds."""
    records = [ratios({"x": 1.0, "quiet": 0.1}, {"x": 2.0, "quiet": quiet}) for quiet in (0.2, 0.0)]
    assert medians(records) == medians(records[::-1]) == {"x": 0.5}
