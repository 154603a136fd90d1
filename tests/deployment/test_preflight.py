"""What is looked at on this machine before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployment.cli.machine import Machine, read_machine
from deployment.cli.main import main
from deployment.cli.preflight import Findings, inspect_here
from deployment.config import AppConfig
from orca_core.errors import ConfigError
from orca_core.host_memory import MemoryReading
from tests.core.tiny_models import tiny_llama

GIB = 1024**3
NO_GPU = "this machine has 0 that torch can use: it would not start here"
BOUND = "MemAvailable of this machine"
MACHINE = Machine(MemoryReading(8 * GIB, 7 * GIB, 0, BOUND), n_cpus=4, n_gpus=2)
PER_SLOT = 2 * 3 * 2 * 12 * 4
"""Bytes: K and V, layers, heads, their size, float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def app(model: str, **sections: Any) -> AppConfig:
    return AppConfig.parse({"model": {"source": model, "dtype": "float32"}, **sections})


def problems(config: AppConfig, starting: bool = False) -> dict[str, str]:
    return {problem.field: problem.reason for problem in inspect_here(config, MACHINE, starting).problems}


def test_a_model_that_is_here(model: str) -> None:
    findings = inspect_here(app(model), MACHINE)
    assert (findings.problems, findings.warnings, findings.longest) == ((), (), 256)
    assert inspect_here(app(model, engine={"n_slots": 96}), MACHINE).longest == 96
    assert inspect_here(app(model, engine={"max_model_len": 64}), MACHINE).longest == 64


def test_a_hub_id_is_taken_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    findings = inspect_here(app("some-organisation/some-model", engine={"max_model_len": 10**6}), MACHINE)
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
    findings = inspect_here(app(model, auth={"api_keys_file": str(file)}), MACHINE)
    assert findings.problems == ()
    assert "nobody would be let in" in findings.warnings[0]


def test_more_slots_than_the_machine_has_memory(model: str) -> None:
    fits = 7 * GIB // (2 * PER_SLOT)
    replicas = {"min": 1, "max": 2}
    assert inspect_here(app(model, engine={"n_slots": fits}, replicas=replicas), MACHINE).warnings == ()
    (warning,) = inspect_here(app(model, engine={"n_slots": fits + 1}, replicas=replicas), MACHINE).warnings
    assert warning.startswith("engine.n_slots: K and V of 2 replicas would take 7168 MiB")
    assert warning.endswith(f"7168 of 8192 MiB are available ({BOUND})")
    on_gpu = app(model, engine={"n_slots": fits + 1}, replicas={**replicas, "num_gpus": 1})
    assert inspect_here(on_gpu, MACHINE).warnings == ()


def test_more_replicas_than_the_machine_has_memory(model: str) -> None:
    config = app(model, replicas={"max": 100, "num_cpus": 0.01})
    assert problems(config)["replicas.max"].startswith("100 replicas need at least 35")
    assert problems(config)["replicas.max"].endswith(f"; 7168 of 8192 MiB are available ({BOUND})")


def test_memory_that_others_hold_now_keeps_nobody_from_writing_a_config(model: str) -> None:
    """They may be the very service that is to be changed."""
    config = app(model, replicas={"max": 22, "num_cpus": 0.01})
    findings = inspect_here(config, MACHINE)
    assert findings.problems == ()
    assert findings.warnings[0].startswith("replicas.max: 22 replicas need at least 7")
    assert list(problems(config, starting=True)) == ["replicas.max"]
    assert inspect_here(config, MACHINE, starting=True).warnings == ()


def test_gpus_that_are_not_here(model: str) -> None:
    assert inspect_here(app(model, replicas={"min": 2, "max": 2, "num_gpus": 1}), MACHINE).warnings == ()
    config = app(model, replicas={"min": 3, "max": 3, "num_gpus": 1})
    warning = f"replicas.num_gpus: 3 replicas need 3 GPUs; {NO_GPU.replace('0', '2')}"
    assert inspect_here(config, MACHINE) == Findings((), (warning,), 256)
    assert problems(config, starting=True) == {"replicas.num_gpus": "3 replicas need 3 GPUs; this machine has 2"}
    may_grow = app(model, replicas={"min": 1, "max": 3, "num_gpus": 1})
    for starting in (False, True):
        findings = inspect_here(may_grow, MACHINE, starting)
        assert findings.problems == ()
        assert findings.warnings[0].endswith("has 2 that torch can use: no more than 2 would start here")


def test_cpus_that_are_not_here(model: str) -> None:
    ingress = {"replicas": 2, "num_cpus": 0.5}
    assert inspect_here(app(model, replicas={"max": 4}), MACHINE).warnings == ()
    (warning,) = inspect_here(app(model, replicas={"max": 4}, ingress=ingress), MACHINE).warnings
    assert warning.startswith("replicas.num_cpus: 4 replicas need 4 CPUs and 1 for ingresses; this machine has 4: ")
    (warning,) = inspect_here(app(model, replicas={"num_cpus": 8}), MACHINE).warnings
    assert warning.startswith("replicas.num_cpus: 1 replica needs 8 CPUs; this machine has 4: ")


def test_all_problems_are_raised_together(model: str) -> None:
    config = app(model, engine={"max_model_len": 999}, auth={"api_keys_file": "/no/keys"})
    with pytest.raises(ConfigError) as caught:
        inspect_here(config, MACHINE).raise_problems()
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


def test_check_looks_for_gpus_only_where_some_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A config for another machine is no error."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    file = tmp_path / "serve.yaml"
    file.write_text(
        CONFIG.replace("nothing-here", model).replace("auth: {api_keys_file: /no/keys}", "replicas: {num_gpus: 1}")
    )
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == f"warning: replicas.num_gpus: 1 replica needs 1 GPU; {NO_GPU}"
    assert main(["check", str(file), "--elsewhere"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("torch.cuda.device_count", lambda: pytest.fail("looked for GPUs"))
    assert read_machine(with_gpus=False).n_gpus == 0
