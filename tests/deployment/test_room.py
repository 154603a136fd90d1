from __future__ import annotations

from pathlib import Path

import pytest

from deployment.cli.room import PROCESS_BYTES, check_gpus, check_memory, weight_bytes
from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.source import ModelSource

MIB = 1024 * 1024


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
    check_memory(app, source, 1000 * each)
    with pytest.raises(ConfigError, match="1000 replicas need at least 352000 MiB") as caught:
        check_memory(app, source, 24_000 * MIB)
    assert caught.value.field == "replicas.max"


def test_weights_on_a_gpu_need_no_ram(source: ModelSource) -> None:
    check_memory(AppConfig.parse({"replicas": {"num_gpus": 1}}), source, PROCESS_BYTES)


def test_gpus_that_are_not_there() -> None:
    app = AppConfig.parse({"replicas": {"min": 3, "max": 3, "num_gpus": 1}})
    check_gpus(app, 3)
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs; this machine has 1"):
        check_gpus(app, 1)
