"""``AppConfig``: defaults, refusals that name the field, and what the engine is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployment.config import AppConfig
from orca_core.config import EMBEDDED_MODEL, EngineConfig
from orca_core.errors import ConfigError

_INTERVAL = "replicas.load_report_interval_s"


def test_defaults() -> None:
    config = AppConfig.parse({})
    assert config == AppConfig.parse(None) == AppConfig()
    assert config.model.id == config.model.source == EMBEDDED_MODEL
    assert (config.replicas.min, config.replicas.start, config.replicas.max) == (1, 1, 1)
    engine = config.engine_config()
    assert (engine.device, engine.n_slots, engine.threads) == ("cpu", None, 1)
    assert (engine.prefix_cache, engine.overtaking_s) == (True, 0.0)


def test_a_service_that_may_scale_to_zero_starts_with_one_replica() -> None:
    replicas = AppConfig.parse({"replicas": {"min": 0, "max": 3}}).replicas
    assert (replicas.min, replicas.start, replicas.max, replicas.cold_requests) == (0, 1, 3, "wait")
    assert AppConfig.parse({"replicas": {"min": 0, "max": 3, "initial": 2}}).replicas.start == 2


def test_memory_and_scheduling_keys_reach_the_engine() -> None:
    keys = {"prefix_cache": False, "overtaking_s": 2.5, "max_overtakers": 3}
    engine = AppConfig.parse({"engine": keys}).engine_config()
    assert {key: getattr(engine, key) for key in keys} == keys


def test_is_frozen() -> None:
    with pytest.raises(ValidationError):
        AppConfig().replicas.min = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "field", "words"),
    [
        ({"enigne": {}}, "enigne", "did you mean engine?"),
        ({"engine": {"max_batchsize": 1}}, "engine.max_batchsize", "did you mean engine.max_batch_size?"),
        ({"limits": {"zzz": 1}}, "limits.zzz", "known: max_waiting_requests"),
        ({"engine": 3}, "engine", "must be a mapping"),
        ({"engine": {"max_batch_size": 0}}, "engine.max_batch_size", "greater than or equal to 1"),
        ({"engine": {"max_batch_size": "many"}}, "engine.max_batch_size", "must be a valid integer"),
        (
            {"engine": {"max_batch_size": 600, "max_batch_tokens": 512}},
            "engine.max_batch_tokens",
            "at least max_batch_size (600)",
        ),
        ({"engine": {"n_slots": "some"}}, "engine.n_slots", "must be auto or an integer"),
        ({"engine": {"n_slots": 0}}, "engine.n_slots", "must be auto or an integer"),
        ({"engine": {"n_slots": True}}, "engine.n_slots", "must be auto or an integer"),
        ({"engine": {"n_slots": 8}}, "engine.n_slots", "engine.block_size (16)"),
        ({"engine": {"n_slots": 512, "max_model_len": 513}}, "engine.n_slots", "at least engine.max_model_len (513)"),
        ({"engine": {"n_slots": 200}, "replicas": {"num_gpus": 1}}, "engine.n_slots", "engine.block_size (256)"),
        ({"engine": {"block_size": 0}}, "engine.block_size", "must be auto or an integer"),
        ({"engine": {"block_size": 16}, "replicas": {"num_gpus": 1}}, "engine.block_size", "multiple of 256"),
        ({"engine": {"block_size": 128, "device": "cuda"}, "replicas": {"num_gpus": 1}}, "engine.block_size", "256"),
        ({"engine": {"device": "tpu"}}, "engine.device", "'auto', 'cpu' or 'cuda'"),
        ({"engine": {"device": "cuda"}}, "replicas.num_gpus", "above 0"),
        ({"engine": {"device": "cpu"}, "replicas": {"num_gpus": 1}}, "replicas.num_gpus", "must be 0"),
        ({"engine": {"memory_utilization": 1.5}}, "engine.memory_utilization", "less than or equal to 1"),
        ({"engine": {"prefix_cache": "maybe"}}, "engine.prefix_cache", "valid boolean"),
        ({"engine": {"overtaking_s": -1}}, "engine.overtaking_s", "greater than or equal to 0"),
        ({"engine": {"max_overtakers": -1}}, "engine.max_overtakers", "greater than or equal to 0"),
        ({"model": {"dtype": "int3"}}, "model.dtype", "'float32'"),
        ({"model": {"quantization": "int3"}}, "model.quantization", "'int8'"),
        ({"model": {"quantization": "int8"}, "replicas": {"num_gpus": 1}}, "model.quantization", "none on cuda"),
        ({"model": {"source": ""}}, "model.source", "at least 1 character"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.min", "replicas.max (2)"),
        ({"replicas": {"min": 1, "max": 2, "initial": 3}}, "replicas.initial", "from 1 to 2"),
        ({"replicas": {"min": -1}}, "replicas.min", "greater than or equal to 0"),
        ({"replicas": {"min": 0, "max": 0}}, "replicas.max", "greater than or equal to 1"),
        ({"replicas": {"min": 0, "initial": 0}}, "replicas.initial", "greater than or equal to 1"),
        ({"replicas": {"min": 0, "cold_requests": "drop"}}, "replicas.cold_requests", "'wait' or 'refuse'"),
        ({"replicas": {"num_gpus": 1.5}}, "replicas.num_gpus", "whole number"),
        ({"replicas": {"num_cpus": float("nan")}}, "replicas.num_cpus", "finite"),
        ({"limits": {"max_logprobs": 21}}, "limits.max_logprobs", "less than or equal to 20"),
        ({"limits": {"max_stop_strings": 17}}, "limits.max_stop_strings", "less than or equal to 16"),
        ({"auth": {"api_keys_file": ""}}, "auth.api_keys_file", "at least 1 character"),
    ],
)
def test_refusals_name_the_field(args: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    assert caught.value.field == field
    assert words in caught.value.reason
    assert "\n" not in str(caught.value)


def test_keys_from_the_environment_are_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCA_API_KEYS_FILE", "/some/file")
    assert AppConfig.parse({}).auth.api_keys_file == "/some/file"
    assert AppConfig.parse({"auth": {"api_keys_file": "/other"}}).auth.api_keys_file == "/other"
    monkeypatch.setenv("ORCA_API_KEYS_FILE", "")
    assert AppConfig.parse({}).auth.api_keys_file is None


def test_empty_sections_are_defaults() -> None:
    assert AppConfig.parse({"replicas": None, "engine": {}}) == AppConfig()


@pytest.mark.parametrize(
    ("source", "model_id"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("org/name", "org/name"),
        ("/models/tiny/", "tiny"),
        ("./tiny", "tiny"),
        ("/models/tiny-Q8.gguf", "tiny-Q8"),
    ],
)
def test_model_id_from_source(source: str, model_id: str) -> None:
    assert AppConfig.parse({"model": {"source": source}}).model.id == model_id
    assert AppConfig.parse({"model": {"source": source, "id": "mine"}}).model.id == "mine"


def test_a_block_has_the_size_its_device_takes() -> None:
    assert AppConfig().engine_config().block_size_on("cpu") == 16
    config = AppConfig.parse({"engine": {"block_size": 512, "cuda_graphs": False}, "replicas": {"num_gpus": 1}})
    assert config.engine_config().block_size_on("cuda") == 512
    assert not config.engine_config().cuda_graphs


def test_engine_config_carries_everything() -> None:
    config = AppConfig.parse(
        {
            "model": {"source": "a/b", "revision": "v1", "dtype": "float32", "quantization": "int8"},
            "engine": {"n_slots": 512, "max_model_len": 128, "max_batch_size": 4, "max_batch_tokens": 64},
            "replicas": {"num_cpus": 2.5, "max": 4},
            "limits": {"max_stream_backlog": 9},
        }
    )
    engine = config.engine_config()
    assert (engine.model, engine.revision, engine.dtype) == ("a/b", "v1", "float32")
    assert (engine.quantization, AppConfig().engine_config().quantization) == ("int8", "none")
    assert (engine.n_slots, engine.max_model_len, engine.max_batch_size, engine.max_batch_tokens) == (512, 128, 4, 64)
    assert (engine.threads, engine.max_stream_backlog) == (2, 9)
    assert engine.memory_utilization is None


@pytest.mark.parametrize(("num_gpus", "share"), [(0.5, 0.45), (1, 0.9), (2, 0.9)])
def test_gpu_memory_share(num_gpus: float, share: float) -> None:
    config = AppConfig.parse({"replicas": {"num_gpus": num_gpus}})
    assert config.engine_config().device == "auto"
    assert config.engine_config().memory_utilization == pytest.approx(share)


def test_a_replica_is_not_lost_before_it_could_have_said_something() -> None:
    assert AppConfig.parse({}).failover.max_resumes == 3
    with pytest.raises(ConfigError, match=r"failover\.silence_s: must be at least 4 times .* \(2\)"):
        AppConfig.parse({"replicas": {"load_report_interval_s": 2.0}})
    AppConfig.parse({"replicas": {"load_report_interval_s": 2.0}, "failover": {"silence_s": 8.0}})


def test_how_many_tokens_an_iteration_has_by_itself() -> None:
    assert [EngineConfig().batch_tokens_on(device) for device in ("cpu", "cuda")] == [128, 4096]
    assert AppConfig.parse({"engine": {"max_batch_size": 600}}).engine_config().batch_tokens_on("cpu") == 600
    assert AppConfig.parse({"engine": {"max_batch_tokens": 64}}).engine_config().batch_tokens_on("cuda") == 64


def test_all_that_is_wrong_is_said_at_once() -> None:
    """Unknown keys, values out of range, and what does not fit together, wherever it is."""
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(
            {"enigne": {}, "limits": 3, "engine": {"zzz": 1, "max_batch_size": 0}, "replicas": {"min": "x", "max": 0}}
        )
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["enigne", "limits", "engine.zzz", "engine.max_batch_size", "replicas.min", "replicas.max"]
    assert caught.value.field == "enigne"
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse({"replicas": {"min": 3, "max": 2}, "engine": {"n_slots": 8, "max_model_len": 9}})
    assert [problem.field for problem in caught.value.problems] == ["replicas.min", "engine.n_slots"]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (
            {"replicas": {"min": 3, "max": 2}, "engine": {"max_batch_size": 0, "n_slots": 8, "max_model_len": 9}},
            ["engine.max_batch_size", "replicas.min", "engine.n_slots"],
        ),
        ({"limits": {"zzz": 1}, "replicas": {"num_gpus": 1.5}}, ["limits.zzz", "replicas.num_gpus"]),
        ({"enigne": {}, "engine": {"threads": 9999}}, ["enigne", "engine.threads"]),
        (
            {"engine": {"threads": 9999}, "replicas": {"num_cpu": 2}},
            ["replicas.num_cpu", "engine.threads"],
        ),
        ({"limits": 3, "replicas": {"load_report_interval_s": 9.0}}, ["limits", "failover.silence_s"]),
        (
            {"engine": {"threads": 9999, "max_batch_tokens": 4, "block_size": 1 << 20, "n_slots": 12}},
            ["engine.max_batch_tokens", "engine.block_size", "engine.threads", "engine.n_slots"],
        ),
        ({"drain": {"timeout_s": "x"}, "model": {"quantization": "int8"}, "engine": {"device": "cuda"}},
         ["drain.timeout_s", "replicas.num_gpus", "model.quantization"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_beside_what_is_wrong_by_itself(args: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    assert sorted(problem.field for problem in caught.value.problems) == sorted(fields)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"replicas": {"min": 3, "max": "x"}}, "replicas.max"),
        ({"replicas": {"min": 3, "maks": 4}}, "replicas.maks"),
        ({"replicas": {"initial": 3, "min": "x", "max": 4}}, "replicas.min"),
        ({"engine": {"max_batch_size": -1, "max_batch_tokens": 4}}, "engine.max_batch_size"),
        ({"engine": {"n_slots": 8, "block_sise": 8}}, "engine.block_sise"),
        ({"engine": {"block_size": 16, "device": "cuda"}, "replica": {"num_gpus": 1}}, "replica"),
        ({"engine": {"block_size": 16}, "replicas": {"num_gpus": "one"}}, "replicas.num_gpus"),
        ({"model": {"source": 201 * "x"}}, "model.id"),
        ({"failover": {"silence_s": 0.1}, "replicas": {"load_report_interval_s": -2}}, _INTERVAL),
    ],
)
def test_nothing_is_said_to_misfit_a_value_that_is_wrong_itself(args: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    assert [problem.field for problem in caught.value.problems] == [field]
