"""What Ray tells a driver while it serves, on stdout and a paragraph each: one line on stderr, the whole in a log."""

from __future__ import annotations

import io
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


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
        short, _, rest = line.partition(". ")
        more = ""
        if rest and self._log is not None:
            with suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
                more = f" (more in {self._log.name})"
        with suppress(OSError, ValueError):  # nobody reads it any more
            self._sink.write(f"{short}{more}\n")
            self._sink.flush()
