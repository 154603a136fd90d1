"""``orca-serve generate`` and ``chat``: what reaches the service and what reaches stdout."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployment.auth import ApiKeys
from orca_core.errors import OverloadedError
from orca_core.types import FinishReason
from tests.deployment.cli_rig import address, run, service
from tests.deployment.fake_service import MODEL, WORDS
from tests.deployment.grpc_server import FakeIngress, serving

__all__ = ["address", "service"]

TEXT = "".join(WORDS)


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


def test_a_closed_pipe_is_no_traceback(address: str) -> None:
    code = "import sys; from deployment.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "Hi", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
