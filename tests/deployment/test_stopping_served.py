"""A signal while a service serves or stops: the stop is in order, and nothing keeps it from its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from deployment.cli.launcher import Launcher
from deployment.cli.ray_processes import RayProcesses
from deployment.cli.stopping import StopRequests
from deployment.cli.up import run
from deployment.serve_file import load_serve_file
from orca_core.errors import UnavailableError

STOP = """
import ctypes, signal, sys
from types import SimpleNamespace as Record
from deployment.cli.up import run

def stand_still():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # taken twice: native code that no signal brings back to Python
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

class Launcher:
    app = Record(replicas=Record(start=1), auth=Record(api_keys_file=None), drain=Record(timeout_s=30))
    file = Record(host="127.0.0.1", http_port=8000, grpc_port=9000, app=app)
    model_id, logs, metrics = "m", "-", None

    def start(self, progress):
        pass

    def abort(self):
        raise AssertionError

    def lost(self):
        return "Ray has ended" if sys.argv[1] == "lost" else None

    def drain(self, timeout_s):
        print("drains", timeout_s, flush=True)
        if sys.argv[1] == "stuck":
            stand_still()

    def end(self):
        print("ends", flush=True)
        sys.stdin.readline()
        print("has ended", flush=True)

import atexit
atexit.register(print, "at exit", flush=True)
run(Launcher)
"""


def signals_until(process: subprocess.Popen[str], word: str, first: signal.Signals) -> list[str]:
    """Signals of both kinds, the first after what is said first, until it says the word; what it says."""
    assert process.stderr is not None
    said: list[str] = []
    number = first
    while not said or said[-1].strip() != word:
        said.append(process.stderr.readline())
        assert said[-1], said
        if said[-1].startswith(("logs:", "drains ")):
            process.send_signal(number)
            number = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
    return said


@pytest.mark.parametrize("drain", ["quick", "stuck"])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_keeps_a_stop_from_its_end(drain: str, first: signal.Signals) -> None:
    """The first drains, the second gives up a drain that is stuck in native code, all others change nothing."""
    command = [sys.executable, "-c", STOP, drain]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said = signals_until(process, "ends", first)
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate("\n", timeout=60)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 1, "what is registered for the exit has been run"
    assert next(line for line in said if line.startswith("stopping")).startswith("stopping: open streams may go on")
    assert err.splitlines() == ["has ended"]
    if drain == "stuck":
        assert "stopping now\n" in said


def test_a_ray_that_is_lost_ends_it() -> None:
    """In order, in less time than Ray itself leaves us, and a supervisor sees that it was no wish of ours."""
    command = [sys.executable, "-c", STOP, "lost"]
    process = subprocess.run(command, check=False, input="\n", capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    said = process.stderr.splitlines()
    assert said[-5:] == [
        "orca-serve: Ray has ended",
        "stopping: open streams may go on for 30 s",
        "drains 30",
        "ends",
        "has ended",
    ]


def test_a_drain_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StopRequests.__new__(StopRequests)
    line._line = SimpleQueue()
    stuck = threading.Event()
    try:
        assert not line.wait_for(stuck.wait, 0.05)
    finally:
        stuck.set()


def test_the_end_of_a_part_of_ray_is_seen() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        parts = RayProcesses()
        assert parts.lost() is None
        parts._parts = {psutil.Process(child.pid): "a part"}
        assert parts.lost() is None
        child.kill()
        while parts.lost() is None:  # a zombie, as long as nobody asks for it
            time.sleep(0.01)
        assert parts.lost() == "a part has ended: what fails now would not be mended"
    finally:
        child.kill()
        child.wait()
    assert parts.lost() == "a part has ended: what fails now would not be mended"


def test_ending_does_not_ask_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its shutdown gives SIGTERM the default action back, and the rest would be left undone by the next one."""
    from deployment.cli import launcher as module

    asked: list[object] = []
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "shutdown", lambda: asked.append("ray"))
    monkeypatch.setattr(module.serve, "shutdown", lambda: 1 / 0)
    monkeypatch.setattr(module, "end_children", asked.append)
    launcher = module.Launcher(load_serve_file("local-cpu"), None, False)
    launcher._temp_dir = str(tmp_path)
    launcher.end()
    assert asked == [str(tmp_path)]


@pytest.mark.parametrize(("is_left", "left"), [(True, [2]), (False, [])])
def test_a_start_that_failed_leaves_without_asking_ray(
    is_left: bool, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended its Ray; what Ray does at exit would wait for processes that are gone."""
    from deployment.cli import main as module

    seen: list[int] = []
    monkeypatch.setattr(module, "leave", seen.append)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: is_left))
    monkeypatch.setattr(sys, "argv", ["orca-serve", "no-such-command"])
    assert module.main() == 2
    assert seen == left


def test_what_a_failed_start_began_is_ended() -> None:
    done: list[str] = []

    def start(_: object) -> None:
        raise UnavailableError("no room")

    launcher = SimpleNamespace(start=start, abort=lambda: done.append("abort"), end=lambda: done.append("end"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(UnavailableError, match="no room"):
        run(lambda: cast(Launcher, launcher))
    assert done == ["end"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("address", [None, "auto"])
def test_starting_ray_leaves_signals_as_they_are(
    address: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray's own handler, in native code, prints a stack trace, and nobody hears of the signal before it has."""
    from deployment.cli import launcher as module

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(2, b"*** SIGTERM received ***")

    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    monkeypatch.setattr(module, "own_environment", lambda *_: {})
    before = signal.signal(signal.SIGTERM, ours := lambda *_: None)
    try:
        module.Launcher(load_serve_file("local-cpu"), address, False)._start_ray()
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err == ""
