"""What cannot be constructed wrong: sampling parameters, requests, configuration, errors."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pytest
import torch

from orca_core.config import EngineConfig
from orca_core.errors import ConfigError, InvalidRequestError, RequestTooLargeError
from orca_core.sampling import SampledToken, SamplingRow
from orca_core.sampling.rows import RawLogprobs
from orca_core.stream import StreamUpdate
from orca_core.types import (
    SAMPLING_RANGES,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    Load,
    PositionLogprobs,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
    merge_chunks,
)
from orca_core.validation import make_request
from tests.core.builders import INFO


@pytest.mark.parametrize("name", sorted(SAMPLING_RANGES))
def test_the_ends_of_each_range_are_legal_and_what_lies_beyond_is_not(name: str) -> None:
    """Field case C7."""
    legal = SAMPLING_RANGES[name]
    is_int = isinstance(getattr(SamplingParams(), name), int) or name in ("max_new_tokens", "seed", "logprobs")
    make: Any = int if is_int and not isinstance(getattr(SamplingParams(), name), float) else float
    others = {"max_new_tokens": 2**31 - 1} if name == "min_new_tokens" else {}
    SamplingParams(**{name: make(legal.high), **others})
    if not legal.low_open:
        SamplingParams(**{name: make(legal.low), **others})
    wrong = [make(legal.high) + 1 if name != "seed" else 2**64, make(legal.low) - 1]
    wrong += [make(legal.low)] if legal.low_open else []
    for value in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{name: value, **others})
        assert caught.value.field == name


@pytest.mark.parametrize("name", sorted(SAMPLING_RANGES))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "5", True, [1]])
def test_nan_infinity_and_other_types_are_refused(name: str, value: object) -> None:
    """Field case C5."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("stop", 5),
        ("stop", b"end"),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("logit_bias", 5),
        ("logit_bias", [(1, 2.0)]),
        ("ignore_eos", "false"),
        ("ignore_eos", 1),
        ("include_stop_text", "false"),
        ("include_stop_text", None),
    ],
)
def test_other_sampling_fields(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_one_stop_string_is_no_sequence_of_letters_and_none_is_none() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]
    nothing: Any = None
    params = SamplingParams(stop=nothing, stop_token_ids=nothing, logit_bias=nothing)
    assert params == SamplingParams()


def test_what_was_checked_cannot_change_afterwards() -> None:
    bias, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)  # type: ignore[arg-type]
    bias[1] = math.nan
    stops.append("")
    assert params == SamplingParams(logit_bias={1: 2.0}, stop=("a",))
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_default_that_fits() -> None:
    assert make_request("r", [1], SamplingParams(), INFO).max_new_tokens == 63
    assert make_request("r", [1] * 63, SamplingParams(), INFO).max_new_tokens == 1


@pytest.mark.parametrize(
    ("n_prompt", "wanted", "limit"),
    [
        (60, 4, None),
        (63, 1, None),
        (60, 5, "max_model_len 64"),
        (64, 1, "max_model_len 64"),
        (65, None, "max_model_len"),
    ],
)
def test_exact_fit_succeeds_and_one_more_is_refused_with_both_numbers(
    n_prompt: int, wanted: int | None, limit: str | None
) -> None:
    """Field case C14."""
    sampling = SamplingParams(max_new_tokens=wanted)
    if limit is None:
        assert make_request("r", [1] * n_prompt, sampling, INFO).total_tokens == 64
        return
    with pytest.raises(RequestTooLargeError, match=limit) as caught:
        make_request("r", [1] * n_prompt, sampling, INFO)
    assert str(n_prompt) in str(caught.value)


@pytest.mark.parametrize(
    "ids",
    [
        [], [-1], [100], [1, 10**12], [True], ["a"], 5, None, b"abc", "abc", {1, 2}, {1: 2}, (i for i in (1, 2)),
        torch.tensor([1, 2]), torch.tensor([]).numpy(),
    ],
    ids=lambda ids: type(ids).__name__,  # a repr may hold an address, and workers must agree
)  # fmt: skip
def test_prompts_that_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequestError):
        make_request("r", ids, SamplingParams(max_new_tokens=1), INFO)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias={100: 1.0}),
        SamplingParams(stop_token_ids=(100,)),
        SamplingParams(min_new_tokens=100),
        SamplingParams(min_new_tokens=1, stop_token_ids=tuple(range(100))),
    ],
)
def test_ids_and_counts_beyond_the_model_are_refused(sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError):
        make_request("r", [1], sampling, INFO)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, "5", True, [], 10**400, 10**10])
def test_bad_timeouts(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequestError):
        make_request("r", [1], SamplingParams(), INFO, timeout_s)


def test_a_seed_is_always_resolved() -> None:
    assert make_request("r", [1], SamplingParams(seed=7), INFO).seed == 7
    seeds = {make_request("r", [1], SamplingParams(), INFO).seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("dtype", "int3"), ("device", "tpu"), ("max_batch_size", 0), ("max_batch_tokens", 4),
        ("n_slots", 0), ("memory_utilization", 0.0), ("memory_utilization", 1.1), ("memory_share", 2.0),
        ("progress_timeout_s", 0.0), ("threads", 0), ("overtaking_s", -1.0), ("overtaking_s", math.nan),
        ("max_overtakers", -1), ("model", 5), ("model", None), ("revision", 5), ("dtype", []), ("device", None),
        ("prefix_cache", "no"), ("cuda_graphs", 1), ("threads", 10**5), ("threads", 1.0), ("threads", "4"),
        ("block_size", 10**6), ("block_size", True), ("max_batch_size", "16"), ("max_batch_size", None),
        ("max_batch_size", 4.0), ("max_batch_size", True), ("n_slots", "auto"), ("max_model_len", 1e3),
        ("max_kv_bytes", "1GB"), ("max_stream_backlog", None), ("max_waiting_requests", 0.5),
        ("max_waiting_slots", "0"), ("max_overtakers", 1.5), ("overtaking_s", "1"), ("overtaking_s", None),
        ("memory_utilization", "0.9"), ("memory_utilization", True), ("memory_share", None),
        ("progress_timeout_s", "60"), ("progress_timeout_s", math.nan),
        ("quantization", "int3"), ("quantization", []),
    ],
)  # fmt: skip
def test_engine_config_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_engine_config_takes_the_ends_and_integers_for_numbers() -> None:
    config = EngineConfig(
        threads=1024, block_size=65_536, memory_utilization=1, overtaking_s=0, progress_timeout_s=1,
        max_waiting_requests=0, max_batch_tokens=None,
    )  # fmt: skip
    assert config.block_size_on("cuda") == 65_536


def test_no_repr_shows_a_prompt_or_an_answer() -> None:
    """They end up in logs."""
    logprobs = (PositionLogprobs(TokenLogprob(4321, -0.5, "SECRET", b"SECRET"), (TokenLogprob(4321, -1.0, "SECRET"),)),)
    values: list[object] = [
        SamplingParams(stop=("SECRET",)), GenerationRequest("r", (4321,), 3, 0, emitted_ids=(4321,)), logprobs,
        GenerationChunk("r", "SECRET", (4321,), logprobs, FinishReason.STOP, "SECRET"),
        GenerationResult(
            "r", (4321,), "SECRET", (4321,), FinishReason.STOP, Usage(1, 1), Timings(), "SECRET", logprobs
        ),
        StreamUpdate("SECRET", FinishReason.STOP, "SECRET"),
        SampledToken(4321, logprobs=RawLogprobs((4321, -0.5), ((4321, -0.5),))),
        SamplingRow(SamplingParams(), 0, 3, (4321,), (4321,)),
    ]  # fmt: skip
    for value in values:
        assert not re.search("SECRET|4321", repr(value)), value
    assert "finish_reason" in repr(values[3])  # what is harmless stays


def test_quantised_weights_are_for_cpus() -> None:
    EngineConfig(quantization="int8", device="cpu").check_device("cpu")
    EngineConfig(device="cuda")
    with pytest.raises(ConfigError, match="none on cuda"):
        EngineConfig(quantization="int8", device="cuda")
    with pytest.raises(ConfigError, match="none on cuda"):
        EngineConfig(quantization="int4").check_device("cuda")


def test_headroom_may_be_negative() -> None:
    assert Load(n_slots=100, reserved_slots=90, queued_slots=40).headroom == -30


def test_what_is_promised_and_not_used_is_told() -> None:
    assert Load(n_slots=100, reserved_slots=90, used_slots=12).unused_slots == 78


def test_merging_keeps_order_and_the_last_word() -> None:
    parts = [GenerationChunk("r", "a", (1,)), GenerationChunk("r", "b", (2, 3), usage=Usage(1, 3))]
    assert merge_chunks(parts) == GenerationChunk("r", "ab", (1, 2, 3), usage=Usage(1, 3))


def test_time_per_output_token_is_after_the_first() -> None:
    assert Timings(ttft_s=1.0, total_s=3.0).tpot_s(5) == 0.5
    assert Timings(ttft_s=1.0, total_s=3.0).tpot_s(1) == 0.0
