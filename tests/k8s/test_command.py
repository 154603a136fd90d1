"""The command: what it looks at, what it says, and what it exits with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from k8s_check.__main__ import main
from k8s_check.outside import LINTER_VARIABLE, PROMTOOL_VARIABLE
from k8s_check.render import COMPONENTS, KUBECTL_VARIABLE, ROOT


def test_the_command_says_what_it_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(KUBECTL_VARIABLE, raising=False)
    monkeypatch.delenv(PROMTOOL_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert main() == 0
    said = capsys.readouterr().out
    assert "skipped: all manifests: no kubectl" in said
    assert "skipped: no promtool" in said


def own_kustomization(folder: Path, images: str) -> Path:
    base = os.path.relpath(ROOT / "k8s" / "overlays" / "cpu", folder.resolve())
    (folder / "kustomization.yaml").write_text(f"resources: [{base}]\nimages: [{images}]\n")
    return folder


@pytest.mark.parametrize(
    ("images", "code", "said"),
    [
        ("{name: registry.example.com/orca-serve, newName: r.example.net/orca-serve}", 0, "0 problems"),
        (
            "{name: orca-serve, newName: r.example.net/orca-serve}",
            1,
            "images: [{name: registry.example.com/orca-serve,",
        ),
    ],
)
def test_a_kustomization_of_ones_own(
    kubectl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], images: str, code: int, said: str
) -> None:
    assert main([str(own_kustomization(tmp_path, images))]) == code
    out = capsys.readouterr().out
    assert said in out
    assert f"k8s-check: {tmp_path}:" in out
    assert "looked at your own folders: 1 checked" in out


def test_a_component_brings_its_image_under_its_first_name(
    kubectl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_kustomization(tmp_path, "{name: registry.example.com/orca-serve, newName: r.example.net/orca-serve}")
    cache = os.path.relpath(COMPONENTS / "model-cache", folder.resolve())
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(f"components: [{cache}]\n")
    assert main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert "workers: image 'orca-serve:0.1.0' must be the service's own" in said
    assert "Job/orca-model-download: image 'orca-serve:0.1.0' must be the service's own" in said


REMOVES = "{$patch: delete, apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: orca-workers}}"


LOOKS = '[{"op": "test", "path": "/kind", "value": "RayService"}]'
"""A patch that changes nothing. An empty one is refused by older kustomize."""


@pytest.mark.parametrize(
    ("target", "patch", "said"),
    [
        (
            "{kind: RayService, name: orka}",
            LOOKS,
            "no object is RayService/orka: kustomize changes nothing; did you mean orca",
        ),
        ("{kind: Rayservice}", LOOKS, "no object is Rayservice: kustomize changes nothing; did you mean RayService?"),
        ("{kind: RayService, name: or.*}", LOOKS, ""),
        ("{labelSelector: a=b}", LOOKS, ""),
        ("{kind: PodDisruptionBudget}", REMOVES, ""),
    ],
)
def test_a_patch_for_nobody(
    kubectl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, patch: str, said: str
) -> None:
    folder = own_kustomization(tmp_path, "{name: registry.example.com/orca-serve, newName: r.example.net/orca-serve}")
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(f"patches:\n  - target: {target}\n    patch: |\n      {patch}\n")
    assert main([str(folder)]) == (1 if said else 0)
    assert said in capsys.readouterr().out


def test_a_folder_that_is_not_there(kubectl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere: not ok" in capsys.readouterr().out


def test_a_missing_tool_is_an_error_where_it_is_strict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(KUBECTL_VARIABLE, raising=False)
    monkeypatch.delenv(PROMTOOL_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert main(["--strict"]) == 1
    assert "missing: all manifests: no kubectl" in capsys.readouterr().out


@pytest.mark.parametrize("variable", [KUBECTL_VARIABLE, PROMTOOL_VARIABLE, LINTER_VARIABLE])
def test_a_tool_that_is_named_and_not_there_is_one_line(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "/nowhere/tool")
    assert main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"k8s-check: {variable}=/nowhere/tool: there is no such")
