"""What a signal does to ``up``: at once while it starts, in order once it serves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Self

if TYPE_CHECKING:
    import psutil

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_CLEAN_UP_S: Final = 10.0
"""The longest a signal waits for what ends beside the process."""
_HUSHED_S: Final = 1.0
"""The longest it waits for a spinner to stop."""
_KILLED_S: Final = 3.0
"""How long killed processes may take to be gone."""
_LOOK_S: Final = 1.0
"""Between two looks at whether what is served still can be."""
FOLDER_VARIABLE: Final = "ORCA_SERVE_FOLDER"
"""In the environment of all that ``up`` starts: the folder it writes to. Whoever outlives its parent is known by it."""
_CLEAN_LINE: Final = "\r\x1b[2K\x1b[?25h"  # start of the line, erase it, show the cursor: a spinner may be there


class StopRequests:
    """SIGINT and SIGTERM, in line for the main thread: none is lost, none interrupts it. Main thread only.

    A handler that raises would not do: what runs then may be a callback of asyncio or of Ray's native code, and both
    keep an exception to themselves; or it may be the clean-up itself.
    """

    def __init__(self) -> None:
        self._line: SimpleQueue[bool] = SimpleQueue()  # whose ``put`` a signal handler may call
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._line.put(True)

    def wait(self, look: Callable[[], str | None]) -> str | None:
        """Until one has come; or until ``look``, called once a second, says why there is nothing left to wait for."""
        while True:
            with suppress(Empty):
                self._line.get(timeout=_LOOK_S)
                return None
            reason = look()
            if reason is not None:
                return reason

    def wait_for(self, call: Callable[[], object], within_s: float) -> bool:
        """Until ``call`` is over; False: another one has come, or it took too long, and goes on in its own thread."""
        threading.Thread(target=self._run, args=(call,), name="orca-drain", daemon=True).start()
        with suppress(Empty):
            return not self._line.get(timeout=within_s)
        return False

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            self._line.put(False)


def ignore_signals() -> None:
    """From now on SIGINT and SIGTERM do nothing. Main thread only."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave(status: int) -> NoReturn:
    """End this process now. ``atexit`` has no say: Ray's would look for processes that have been ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class SignalsKept:
    """Gives the handlers of SIGINT and SIGTERM back at the end."""

    def __enter__(self) -> None:
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StartGuard:
    """While the block runs, SIGINT and SIGTERM end the process at once, with status 128 + the signal's number.

    Python handles a signal between two bytecodes of the main thread, and that may sit in native code of Ray's for
    minutes. So the number goes down a pipe (``signal.set_wakeup_fd``) to a thread, which ends the process. Nothing is
    open yet that could be saved. ``hush`` and ``clean_up`` may be set to what is to be called first, before and after
    the one line that is said; neither from the main thread. ``end`` is how the process ends. Main thread only.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.hush: Callable[[], object] = lambda: None
        self.clean_up: Callable[[], object] = lambda: None
        self._end = end
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._wait, name="orca-start-guard", daemon=True)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            signal.signal(number, _nothing)  # the pipe is written to only where there is a handler
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._stderr = os.dup(2)  # which leads elsewhere while Ray is kept quiet
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()  # if a signal came, for ever: the status is that thread's to give
        self._reader.close()
        os.close(self._stderr)

    def _wait(self) -> None:
        while number := self._reader.recv(1):
            if number[0] in _SIGNALS:
                self._stop(number[0])
                return

    def _stop(self, number: int) -> None:
        _within(_HUSHED_S, self.hush)
        start = _CLEAN_LINE if os.isatty(self._stderr) else ""
        with suppress(OSError):  # past ``sys.stderr``, whose lock the main thread may hold
            os.write(self._stderr, f"{start}orca-serve: stopped while starting\n".encode())
        _within(_CLEAN_UP_S, self.clean_up)
        self._end(128 + number)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """As a handler."""


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Wait for ``call`` so long at most. What it raises is reported by ``threading.excepthook``."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def end_children(folder: str | Path | None) -> None:
    """Kill all processes that stem from this one, then remove the folder they wrote to.

    Until none is left, since the main thread may be starting the next one.
    """
    import psutil  # which an installation of the client alone lacks

    deadline = time.monotonic() + _KILLED_S
    while (children := _halt_children(folder)) and time.monotonic() < deadline:
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, deadline - time.monotonic())
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _halt_children(folder: str | Path | None) -> set[psutil.Process]:
    """All that stem from this process, halted: one that ran could start another, which would stem from nobody."""
    import psutil

    halted: set[psutil.Process] = set()
    while new := {*psutil.Process().children(recursive=True), *_of_folder(folder)} - halted:
        for child in new:
            with suppress(psutil.Error):
                child.suspend()
        halted |= new
    return {child for child in halted if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def _of_folder(folder: str | Path | None) -> list[psutil.Process]:
    """The processes that say they belong to it."""
    import psutil

    found = []
    for process in psutil.process_iter() if folder is not None else ():
        with suppress(psutil.Error, OSError):
            if process.environ().get(FOLDER_VARIABLE) == str(folder) and process.pid != os.getpid():
                found.append(process)
    return found
