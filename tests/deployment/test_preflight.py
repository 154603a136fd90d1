"""What is looked at on this machine before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployment.cli.main import main
from deployment.cli.preflight import inspect_here
from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.host_memory import MemoryReading
from tests.core.tiny_models import tiny_llama

GIB = 1024**3
MEMORY = MemoryReading(total=8 * GIB, available=8 * GIB, used_by_us=0)
PER_SLOT = 2 * 3 * 2 * 12 * 4
"""Bytes: K and V, layers, heads, their size, float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def app(model: str, **sections: Any) -> AppConfig:
    return AppConfig.parse({"model": {"source": model, "dtype": "float32"}, **sections})


def problems(config: AppConfig, memory: MemoryReading = MEMORY) -> dict[str, str]:
    return {problem.field: problem.reason for problem in inspect_here(config, memory).problems}


def test_a_model_that_is_here(model: str) -> None:
    findings = inspect_here(app(model), MEMORY)
    assert (findings.problems, findings.warnings, findings.longest) == ((), (), 256)
    assert inspect_here(app(model, engine={"n_slots": 96}), MEMORY).longest == 96
    assert inspect_here(app(model, engine={"max_model_len": 64}), MEMORY).longest == 64


def test_a_hub_id_is_taken_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    findings = inspect_here(app("some-organisation/some-model", engine={"max_model_len": 10**6}), MEMORY)
    assert (findings.problems, findings.longest) == ((), None)


@pytest.mark.parametrize("source", ["nothing-here", "/no/such/folder", "./none.gguf"])
def test_a_model_that_is_nowhere(source: str) -> None:
    assert "no such file or folder" in problems(app(source))["model.source"]


def test_a_folder_whose_architecture_is_unknown(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["NopeForCausalLM"]}))
    assert "NopeForCausalLM" in problems(app(str(tmp_path)))["model.source"]


def test_longer_than_the_model_can(model: str) -> None:
    assert problems(app(model, engine={"max_model_len": 256})) == {}
    found = problems(app(model, engine={"max_model_len": 257}))
    assert found == {"engine.max_model_len": "must be at most 256, the limit of the model"}


def test_keys(model: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert "cannot read" in problems(app(model, auth={"api_keys_file": str(file)}))["auth.api_keys_file"]
    file.write_text("# none yet\n")
    findings = inspect_here(app(model, auth={"api_keys_file": str(file)}), MEMORY)
    assert findings.problems == ()
    assert "nobody would be let in" in findings.warnings[0]


def test_more_slots_than_the_machine_has_memory(model: str) -> None:
    fits = 8 * GIB // (2 * PER_SLOT)
    replicas = {"min": 1, "max": 2}
    assert inspect_here(app(model, engine={"n_slots": fits}, replicas=replicas), MEMORY).warnings == ()
    (warning,) = inspect_here(app(model, engine={"n_slots": fits + 1}, replicas=replicas), MEMORY).warnings
    assert warning.startswith("engine.n_slots: K and V of 2 replicas would take 8192 MiB")
    on_gpu = app(model, engine={"n_slots": fits + 1}, replicas={**replicas, "num_gpus": 1})
    assert inspect_here(on_gpu, MEMORY).warnings == ()


def test_more_replicas_than_the_machine_has_memory(model: str) -> None:
    assert "100 replicas need" in problems(app(model, replicas={"max": 100}))["replicas.max"]


def test_all_problems_are_raised_together(model: str) -> None:
    config = app(model, engine={"max_model_len": 999}, auth={"api_keys_file": "/no/keys"})
    with pytest.raises(ConfigError) as caught:
        inspect_here(config, MEMORY).raise_problems()
    assert [each.field for each in caught.value.problems] == ["auth.api_keys_file", "engine.max_model_len"]


CONFIG = """
applications:
  - import_path: deployment.app:build
    args:
      model: {source: nothing-here}
      auth: {api_keys_file: /no/keys}
"""


@pytest.mark.parametrize("command", ["check", "up"])
def test_each_problem_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG)
    assert main([command, str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["auth.api_keys_file", "model.source"]
    file.write_text(CONFIG + "      engine: {zzz: 1, max_batch_size: 0}\n")
    assert main([command, str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["engine.zzz", "engine.max_batch_size"]


def test_a_config_for_other_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG)
    assert main(["check", str(file), "--elsewhere"]) == 0
    assert "requests  as the model can" in capsys.readouterr().out
