"""What Ray tells a driver while it serves, on stdout and a paragraph each: one line on stderr, the whole in a log."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE: Final = re.compile(r"\[(state-dump|\d{4}-\d\d-\d\d )")
"""The last lines of a log, which Ray adds to what it says of a process that has ended."""


class Notes(io.TextIOBase):
    """In the place of ``sys.stdout``, to which Ray's threads print: the first sentence of each line goes to ``sink``.

    ``log``: the file that gets the whole line; without one, or where it cannot be written, only that sentence is kept.
    """

    def __init__(self, sink: TextIO, log: Path | None) -> None:
        self._sink = sink
        self._log = log
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Any part of a line, or several."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._note(_COLOURS.sub("", line).strip())
        return len(text)

    def _note(self, line: str) -> None:
        if not line:
            return
        is_log = _LOG_LINE.match(line) is not None
        short, _, rest = line.partition(". ")
        more = ""
        if (rest or is_log) and self._log is not None:
            with suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
                more = f" (more in {self._log.name})"
        if is_log:
            return
        with suppress(OSError, ValueError):  # nobody reads it any more
            self._sink.write(f"{short}{more}\n")
            self._sink.flush()


@contextmanager
def silence() -> Iterator[None]:
    """Ray prints, past ``sys.stdout`` and ``sys.stderr``, what it thinks of actors that end while it waits for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept, nowhere = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
        sys.stdout.flush()
    finally:
        for target, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        os.close(nowhere)
