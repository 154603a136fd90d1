"""Processes beside this one that do one thing when they are asked: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from orca_core.errors import UnavailableError

_END_S: Final = 30.0
"""Seconds in which it must have ended once nobody asks."""


class Helper:
    """``with Helper(module) as helper``: ``python -m module``, which runs ``answer_lines``, and ends with us.

    It is started once and asked often, so that nothing of its start is ever measured.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Wait for the answer. Raises ``UnavailableError`` with what went wrong there."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise UnavailableError(f"{self._module}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101 - both were asked for
            with suppress(BrokenPipeError):  # of a process that has ended
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer_lines(answer: Callable[..., dict[str, Any]]) -> None:
    """Body of such a process: answer until nobody asks any more."""
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
