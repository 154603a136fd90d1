"""A process that holds one engine: a line of JSON with requests goes in, a line with what became of them comes out.

In: ``{"requests": [{"at_s": 0.0, "prompt": [5, 7], "new_tokens": 64}, …]}``. The runner's clock starts when it has read
the line. Out: ``{"requests": [{"first_s": 0.2, "last_s": 1.9, "tokens": 64}, …]}`` in the same order, seconds on that
clock, or ``{"error": "…"}``. Lines that are neither are taken for chatter. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Final, Self

from deployment.bench.peers.works import Ask, Times

_END_S: Final = 60.0
"""Seconds in which it must have ended once nobody asks."""
_TAIL_BYTES: Final = 1500


class RunnerError(Exception):
    """A runner ended, said that it failed, took too long, or did something else than it was asked."""


def parse_answer(line: str, asks: Sequence[Ask]) -> list[Times] | None:
    """The answer in a line of output; ``None`` where it holds none. Raises ``RunnerError``."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or not ("requests" in said or "error" in said):
        return None
    if "error" in said:
        raise RunnerError(str(said["error"]))
    found = said["requests"]
    if not isinstance(found, list) or len(found) != len(asks):
        raise RunnerError(f"it answered for {len(found) if isinstance(found, list) else found} of {len(asks)} requests")
    return [_times(ask, each) for ask, each in zip(asks, found, strict=True)]


def _times(ask: Ask, said: Any) -> Times:
    try:
        first, last, tokens = float(said["first_s"]), float(said["last_s"]), int(said["tokens"])
    except (TypeError, KeyError, ValueError):
        raise RunnerError(f"an answer without first_s, last_s and tokens: {said}") from None
    if tokens != ask.new_tokens:
        raise RunnerError(f"it made {tokens} tokens where {ask.new_tokens} were asked for")
    if not ask.at_s <= first <= last:
        raise RunnerError(f"its times are out of order: arrived {ask.at_s}, first {first}, last {last}")
    return Times(ask.at_s, first, last, len(ask.prompt), tokens)


class Runner:
    """``with Runner(argv, env, timeout_s) as runner``; the process and all its children end with it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_broken = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the runner
        try:
            self._process = subprocess.Popen(  # noqa: S603 - what the user's own file says
                list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise RunnerError(f"{argv[0]}: {error.strerror}") from None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, asks: Sequence[Ask]) -> list[Times]:
        """What became of the requests, in their order. Raises ``RunnerError``, and is of no use then."""
        try:
            return self._ask(asks)
        except RunnerError:
            self._is_broken = True
            raise

    def _ask(self, asks: Sequence[Ask]) -> list[Times]:
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"requests": [ask.record() for ask in asks]}) + "\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RunnerError(f"no answer within {self._timeout_s:g} s{self._tail()}") from None
            if line is None:
                raise RunnerError(f"it ended, status {self._process.wait()}{self._tail()}")
            found = parse_answer(line, asks)
            if found is not None:
                return found

    def close(self) -> None:
        """End it: by itself within a minute, or by force; at once where an answer has failed."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._is_broken else _END_S)
        with suppress(ProcessLookupError):  # also what it started and left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _tail(self) -> str:
        """The end of what it said on stderr, after a colon."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        text = self._log.read().decode(errors="replace").strip()
        return f": {text}" if text else ""
