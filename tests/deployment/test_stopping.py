"""A signal while a service starts: the process ends at once, whatever its main thread is in."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from deployment.cli.progress import Progress
from deployment.cli.stopping import StartGuard

START = """
import ctypes, subprocess, sys
from deployment.cli.stopping import end_children
from deployment.cli.up import run

class Launcher:
    def start(self, progress):
        code = "import signal; print(flush=True); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print(child.pid, flush=True)
        mutex = ctypes.create_string_buffer(64)
        while True:  # taken twice: native code that no signal brings back to Python
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    def abort(self):
        end_children(sys.argv[1])

    def end(self):
        print("in order", flush=True)

run(Launcher)
"""


SERVE = """
import sys
from types import SimpleNamespace as Record
from deployment.cli.up import run

class Launcher:
    app = Record(replicas=Record(start=2), auth=Record(api_keys_file=None), drain=Record(timeout_s=30))
    file = Record(host="127.0.0.1", http_port=8000, grpc_port=9000, app=app)
    model_id, logs = "m", sys.argv[1]

    def start(self, progress):
        progress.say("one step")

    def abort(self):
        raise AssertionError

    @property
    def metrics(self):
        print("(raylet) A worker died. There is much to say of it.")

    def lost(self):
        return None

    def drain(self, timeout_s):
        print("(raylet) Another one")

    def end(self):
        print("(raylet) The last one")

run(Launcher)
"""


def test_stdout_has_the_ready_line_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said: list[str] = []
        while not said or not said[-1].startswith("(raylet)"):
            said.append(process.stderr.readline())
            assert said[-1], said
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "ready grpc=127.0.0.1:9000 http=http://127.0.0.1:8000 model=m replicas=2\n"
    assert said[0].startswith("one step (")
    assert said[-1] == "(raylet) A worker died (more in up.log)\n"
    assert (tmp_path / "up.log").read_text() == "(raylet) A worker died. There is much to say of it.\n"
    assert err.splitlines() == [
        "stopping: open streams may go on for 30 s", "(raylet) Another one", "(raylet) The last one"
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_is_stopped_at_once(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    command = [sys.executable, "-c", START, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (out, err) == ("", "orca-serve: stopped while starting\n")
    assert not child.is_running()
    assert not folder.exists()


def test_the_guard_leaves_nothing_behind() -> None:
    ended: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    previous = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(previous)
    try:
        with StartGuard(end=ended.append):
            pass
        assert signal.set_wakeup_fd(previous) == previous
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert ended == []


def test_a_clean_up_that_fails_does_not_keep_it(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    guard = StartGuard(end=ended.append)
    with guard, pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.excepthook", lambda *_: None)
        guard.clean_up = lambda: 1 / 0
        guard._stop(signal.SIGINT)
    assert ended == [130]
    assert capfd.readouterr().err == "orca-serve: stopped while starting\n"


def test_a_spinner_counts_while_a_step_lasts() -> None:
    """What it draws is asked for anew each time; a step may hold up the main thread for long."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    ticks = iter(range(10))
    progress = Progress(console, lambda: next(ticks))
    progress.say("joining [b]Ray")
    assert [str(progress.__rich__()) for _ in range(2)] == ["joining [b]Ray (2 s)", "joining [b]Ray (3 s)"]


def test_it_is_seen_while_descriptor_2_leads_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(2)
    with Progress(clock=lambda: 0.0) as progress, (tmp_path / "noise").open("w") as noise:
        os.dup2(noise.fileno(), 2)
        try:
            progress.say("joining")
            os.write(2, b"noise")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert capfd.readouterr().err == "joining (0 s)\n"
    assert (tmp_path / "noise").read_text() == "noise"


def test_after_its_end_nothing_more_is_said() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    with Progress(console, lambda: 0.0) as progress:
        progress.say("one")
        progress.stop()
        progress.say("two")
    assert console.file.getvalue() == "one (0 s)\n"  # type: ignore[attr-defined]


def test_children_that_go_on_starting_others_leave_none_behind() -> None:
    """Those that were being started when it looked: they would belong to nobody (Ray's agents live on for minutes)."""
    forker = "import os, time\nwhile True: os.fork() or time.sleep(60); time.sleep(.004)"
    script = f"""
import subprocess, sys, time
from deployment.cli.stopping import end_children

for _ in range(6):
    subprocess.Popen([sys.executable, "-c", {forker!r}])
time.sleep(1)
end_children(None)
"""
    mark = uuid.uuid4().hex
    environment = os.environ | {"ORCA_TEST_RUN": mark}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    left = _marked(mark)
    for process in left:
        process.kill()
    assert left == []


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ORCA_TEST_RUN") == mark:
                found.append(process)
    return found
