"""The command line: help, exit status, one-line errors, ``check``, and how it ends."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from deployment.cli.progress import Progress
from tests.deployment.cli_rig import run


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(command in out for command in ("up", "generate", "chat", "status", "check"))
    status, out, _ = run(capsys, "--version")
    assert (status, out.startswith("orca-serve ")) == (0, True)
    for command in ("up", "generate", "chat", "status", "check"):
        assert run(capsys, command, "--help")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate",), "PROMPT"),
        (("generate", "x", "--seed", "abc"), "--seed"),
        (("generate", "x", "--nope"), "--nope"),
        (("nope",), "nope"),
        (("generate", ""), "prompt: must not be empty"),
        (("generate", "x", "--timeout", "-1"), "timeout_s"),
        (("check", "/nowhere.yaml"), "/nowhere.yaml"),
        (("up", "/nowhere.yaml"), "/nowhere.yaml"),
        (("up", "--replicas", "0"), "--replicas"),
        pytest.param(("up", "--api-keys", "keys.txt"), "auth.api_keys_file", marks=pytest.mark.model),
    ],
)
def test_unusable_arguments_are_one_line_and_two(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words.lower() in err.lower()
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["local-cpu.yaml", "one-gpu.yaml", "fleet.yaml", "cluster-cpu.yaml"])
def test_check(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "check", name, "--elsewhere")
    assert (status, out.splitlines()[0]) == (0, f"{name}: valid")


@pytest.mark.model
def test_check_looks_at_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.cli.machine.count_cpus", lambda: 2.0)
    status, out, err = run(capsys, "check", "local-cpu")
    assert (status, err) == (0, "")
    assert "requests  up to 8192 tokens, prompt and output" in out.splitlines()


def test_check_names_the_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("applications: [{import_path: 'deployment.app:build', args: {engine: {max_bach_size: 3}}}]\n")
    status, out, err = run(capsys, "check", str(path))
    assert (status, out) == (2, "")
    assert err == "orca-serve: engine.max_bach_size: unknown key; did you mean engine.max_batch_size?\n"


def test_an_interrupt_while_modules_are_read_is_no_traceback() -> None:
    """One that is never found in its place keeps the import up until the signal has come."""
    code = """
import sys
class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "deployment.cli.main":
            print("reads", flush=True)
            sys.stdin.readline()
sys.meta_path.insert(0, Waits())
from deployment.cli.command import main
sys.exit(main())
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, "--version"], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "reads\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT
    with subprocess.Popen([sys.executable, "-c", code, "--version"], text=True, **pipes) as process:  # type: ignore[call-overload]
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out.splitlines()[1][:11], err) == (0, "orca-serve ", "")


def test_progress_prints_each_step_once() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    ticks = iter(range(10))
    with Progress(console, lambda: next(ticks)) as progress:
        for step in ("loading 0/2", "loading 0/2", "loading 1/2"):
            progress.say(step)
    assert console.file.getvalue().splitlines() == ["loading 0/2 (1 s)", "loading 1/2 (2 s)"]  # type: ignore[attr-defined]


def test_a_client_only_installation_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployment.cli.main.app", _lacks_yaml)
    status, _, err = run(capsys, "check", "local-cpu.yaml")
    assert (status, err) == (1, "orca-serve: yaml is not installed; this needs: pip install 'orca-serve[serve]'\n")


def _lacks_yaml(**_: object) -> None:
    raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
