from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployment.cli.machine import count_cpus
from deployment.cli.room import PROCESS_BYTES, check_gpus, check_memory, replicas_on, weight_bytes
from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.host_memory import MemoryReading
from orca_core.source import ModelSource

MIB = 1024 * 1024


def memory(available: int) -> MemoryReading:
    return MemoryReading(64_000 * MIB, available, 0, "MemAvailable of this machine")


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"x" * MIB)
    (tmp_path / "config.json").write_bytes(b"{}" * MIB)
    return ModelSource("m", "safetensors", tmp_path)


def test_the_weights_are_the_weight_files(source: ModelSource, tmp_path: Path) -> None:
    assert weight_bytes(source) == 2 * MIB
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * 5)
    assert weight_bytes(ModelSource("m", "gguf", tmp_path, file)) == 5


def test_more_replicas_than_the_machine_can_hold(source: ModelSource) -> None:
    app = AppConfig.parse({"replicas": {"min": 1, "max": 1000}})
    each = PROCESS_BYTES + 2 * MIB
    check_memory(app, source, memory(1000 * each))
    with pytest.raises(ConfigError, match="1000 replicas need at least 352000 MiB") as caught:
        check_memory(app, source, memory(24_000 * MIB))
    assert caught.value.field == "replicas.max"
    assert "24000 of 64000 MiB are available (MemAvailable of this machine)" in caught.value.reason
    with pytest.raises(ConfigError, match="1 replica needs at least 352 MiB of RAM; 9 of"):
        check_memory(AppConfig.parse({}), source, memory(9 * MIB))


def test_weights_on_a_gpu_need_no_ram(source: ModelSource) -> None:
    check_memory(AppConfig.parse({"replicas": {"num_gpus": 1}}), source, memory(PROCESS_BYTES))


def test_gpus_that_are_not_there() -> None:
    app = AppConfig.parse({"replicas": {"min": 3, "max": 3, "num_gpus": 1}})
    check_gpus(app, 3)
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs; this machine has 1"):
        check_gpus(app, 1)
    with pytest.raises(ConfigError, match="1 replica needs 1 GPU; this machine has 0"):
        check_gpus(AppConfig.parse({"replicas": {"num_gpus": 1}}), 0)


@pytest.mark.parametrize(
    ("each", "n_gpus", "fit"), [(1, 3, 3), (2, 3, 1), (0.5, 3, 6), (0.3, 2, 6), (0.6, 2, 2), (0.1, 1, 10)]
)
def test_a_part_of_a_gpu_is_a_part_of_one(each: float, n_gpus: float, fit: int) -> None:
    assert replicas_on(n_gpus, AppConfig.parse({"replicas": {"num_gpus": each}})) == fit


def test_the_cpus_of_a_container(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    there = count_cpus(file)
    assert there == len(os.sched_getaffinity(0))
    for text, n_cpus in (("max 100000", there), ("50000 100000", 0.5), ("nonsense", there), ("99900000 100000", there)):
        file.write_text(text + "\n")
        assert count_cpus(file) == n_cpus
