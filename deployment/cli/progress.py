"""What ``up`` shows while it starts: a spinner on a terminal, one line a step elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """Shows the newest step and the seconds since the start, on stderr."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = _own_stderr() if console is None else None
        self._console = console or Console(file=self._file, stderr=self._file is None, highlight=False)
        self._clock = clock
        self._started_at = clock()
        self._step = "starting"
        self._spinner: Status | None = None
        self._is_over = False

    def say(self, step: str) -> None:
        """The step that now runs. Said again, it is not printed again."""
        if step == self._step or self._is_over:
            return
        self._step = step
        if self._spinner is None:
            self._console.print(self, soft_wrap=True)

    def __rich__(self) -> Text:
        """The line as of now: a spinner draws it anew, also while a step holds up the main thread."""
        return Text(f"{self._step} ({self._clock() - self._started_at:.0f} s)")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._spinner = self._console.status(self)
            self._spinner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the spinner away and say nothing more. From any thread."""
        self._is_over = True
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
        if self._file is not None:
            self._file.close()


def _own_stderr() -> TextIO | None:
    """A descriptor of its own for stderr: number 2 leads elsewhere while Ray is kept quiet. ``None``: it has none."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, AttributeError):
        return None
    return os.fdopen(descriptor, "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors)
