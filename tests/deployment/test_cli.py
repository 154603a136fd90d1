"""The command line: exit status, one-line errors, and what reaches stdout. Starting Ray is tested end to end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deployment.auth import ApiKeys
from deployment.cli.main import main
from deployment.cli.progress import Progress
from deployment.serve_file import load_serve_file
from orca_core.config import EMBEDDED_MODEL
from orca_core.errors import OverloadedError
from orca_core.types import FinishReason
from tests.core.tiny_models import tiny_llama
from tests.deployment.fake_service import MODEL, WORDS
from tests.deployment.grpc_server import FakeIngress, serving

TEXT = "".join(WORDS)
up_module = import_module("deployment.cli.up")


@pytest.fixture
def service() -> FakeIngress:
    return FakeIngress()


@pytest.fixture
def address(service: FakeIngress) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """``up`` sets variables for Ray; another test's Ray must not see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


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


def test_generate_streams_text(capsys: pytest.CaptureFixture[str], address: str, service: FakeIngress) -> None:
    options = ("--max-new-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "4")
    more = ("--stop", "A", "--stop", "B", "--ignore-eos", "--timeout", "30")
    status, out, err = run(capsys, "generate", "Hi", "--address", address, *options, *more)
    assert (status, out, err) == (0, TEXT + "\n", "")
    sampling = service.calls[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 3)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (4, ("A", "B"), True)
    assert service.calls[0].timeout_s == 30


@pytest.mark.parametrize("as_json", [False, True])
def test_output_that_was_cut_off_says_so_on_stderr(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    with serving(FakeIngress(finish=FinishReason.LENGTH)) as address:
        status, out, err = run(capsys, "generate", "Hi", "--address", address, *(["--json"] if as_json else []))
    assert status == 0
    assert "cut off" not in out
    assert err == ("" if as_json else "[cut off after 5 tokens; --max-new-tokens N allows more]\n")
    assert "256 when left out" in " ".join(run(capsys, "generate", "--help")[1].split())


def test_generate_json(capsys: pytest.CaptureFixture[str], address: str) -> None:
    status, out, _ = run(capsys, "generate", "Hi", "--json", "--address", address)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert "".join(line["text"] for line in lines) == TEXT
    assert [line.get("finish_reason") for line in lines] == [None] * (len(lines) - 1) + ["stop"]
    assert lines[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_prompt_tokens": 1}
    assert lines[-1]["timings"] == {"queue_s": 0.1, "first_token_s": 0.2, "total_s": 0.3}
    assert (lines[-1]["replica"], lines[-1]["resumes"]) == ("r1", 0)


def test_generate_from_stdin_as_chat(
    capsys: pytest.CaptureFixture[str], address: str, service: FakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Grüß".encode())))
    assert run(capsys, "generate", "-", "--chat", "--address", address)[0] == 0
    assert [(m.role, m.content) for m in service.calls[0].messages or ()] == [("user", "Grüß")]


def test_generate_without_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        status, out, err = run(capsys, "generate", "Hi", "--address", address)
    assert (status, out, err) == (1, "", f"orca-serve: no server answers at {address}\n")


def test_server_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeIngress(error=OverloadedError("the line is full", 2.0))) as address:
        status, _, err = run(capsys, "generate", "Hi", "--address", address)
    assert (status, err) == (1, "orca-serve: the line is full; retry after 2 s\n")


def test_chat_keeps_the_session(
    capsys: pytest.CaptureFixture[str], address: str, service: FakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "", "two"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    service.finish = FinishReason.LENGTH
    status, out, err = run(capsys, "chat", "--system", "be brief", "--address", address)
    assert status == 0
    assert err.count("[cut off after 5 tokens") == 2
    assert out.count(TEXT) == 2
    assert MODEL.model_id in err
    turns = [[(m.role, m.content) for m in call.messages or ()] for call in service.calls]
    assert turns[0] == [("system", "be brief"), ("user", "one")]
    assert turns[1] == [*turns[0], ("assistant", TEXT), ("user", "two")]


def test_chat_from_a_pipe_writes_answers_alone(
    capsys: pytest.CaptureFixture[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    status, out, _ = run(capsys, "chat", "--address", address)
    assert (status, out) == (0, f"{TEXT}\n{TEXT}\n")


def test_chat_survives_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one"])

    def read(_: str) -> str:
        for line in lines:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    with serving(FakeIngress(error=OverloadedError("the line is full", 2.0))) as address:
        status, _, err = run(capsys, "chat", "--address", address)
    assert status == 0
    assert "the line is full" in err


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


@pytest.mark.model
def test_up_says_which_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        status, out, err = run(capsys, "up", "--http-port", str(port))
    assert (status, out) == (1, "")
    assert (
        err == f"orca-serve: http_options.port: 127.0.0.1:{port}: Address already in use; --http-port chooses another\n"
    )


def test_up_refuses_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (first, second)]
    status, out, err = run(capsys, "up", "--model", "nothing-here", "--http-port", ports[0], "--grpc-port", ports[1])
    assert (status, out) == (2, "")
    assert err.startswith("orca-serve: model.source: 'nothing-here': there is no such file or folder")


@pytest.mark.parametrize("where", ["option", "environment"])
def test_generate_sends_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    (tmp_path / "keys").write_text("sk-right\n")
    service = FakeIngress()
    service.keys = ApiKeys(tmp_path / "keys")
    with serving(service) as address:
        status, _, err = run(capsys, "generate", "Hi", "--address", address)
        assert status == 1
        assert err == "orca-serve: missing or unknown API key; --api-key KEY or ORCA_API_KEY=KEY gives one\n"
        for command in ("status", "chat"):
            assert "--api-key" in run(capsys, command, "--address", address)[2]
        _, _, err = run(capsys, "generate", "Hi", "--address", address, "--api-key", "sk-wrong")
        assert err == "orca-serve: missing or unknown API key\n"
        if where == "environment":
            monkeypatch.setenv("ORCA_API_KEY", "sk-right")
        option = ("--api-key", "sk-right") if where == "option" else ()
        assert run(capsys, "generate", "Hi", "--address", address, *option)[:2] == (0, TEXT + "\n")
        assert run(capsys, "status", "--json", "--address", address, *option)[0] == 0


@pytest.mark.parametrize(
    ("host", "with_keys", "warns"),
    [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False), ("localhost", False, False)],
)
def test_up_warns_of_an_open_door(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str, with_keys: bool, warns: bool
) -> None:
    (tmp_path / "keys").write_text("sk-right\n")
    keys = str(tmp_path / "keys") if with_keys else None
    up_module._say_next(load_serve_file("local-cpu").with_overrides(host=host, api_keys_file=keys))
    said = capsys.readouterr().err
    assert ("without API keys" in said) == warns
    assert ("--api-key KEY" in said) == with_keys


def test_up_hands_on_paths_that_replicas_and_ingress_will_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("sk-right\n")
    tiny_llama().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    file = up_module._ready_here(load_serve_file("local-cpu").with_overrides(model="tiny", api_keys_file="keys"))
    assert file.app.auth.api_keys_file == str(tmp_path / "keys")
    assert (file.app.model.source, file.app.model.id) == (str(tmp_path / "tiny"), "tiny")
    (tmp_path / EMBEDDED_MODEL).mkdir()
    assert up_module._absolute(EMBEDDED_MODEL) == EMBEDDED_MODEL, "a folder of that name is not what is loaded"


def test_interrupt_cancels_the_call() -> None:
    gone = threading.Event()

    class Endless(FakeIngress):
        async def generate(self, call: Any) -> Any:
            try:
                async for served in super().generate(call):
                    yield served
            finally:
                gone.set()

    with serving(Endless(words=["tick "] * 1_000_000)) as address:
        code = "import sys; from deployment.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "generate", "Hi", "--address", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(10) == "tick tick "
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.stderr.read().strip() == "orca-serve: interrupted"
        assert process.returncode == 1
        assert gone.wait(10)


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


def test_a_closed_pipe_is_no_traceback(address: str) -> None:
    code = "import sys; from deployment.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "Hi", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


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
