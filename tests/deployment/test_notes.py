"""Ray's paragraphs while a service runs."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from deployment.cli.notes import Notes

DIED = "(raylet) A worker died or was killed by an unexpected system error. To troubleshoot, check the logs. Lease: 4"


@pytest.mark.parametrize("folder", ["logs", "nowhere", None])
def test_a_paragraph_becomes_a_line_and_the_log_has_all_of_it(folder: str | None, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = None if folder is None else tmp_path / folder / "up.log"
    sink = io.StringIO()
    with redirect_stdout(Notes(sink, log)) as stdout:
        for text in (DIED.replace("(raylet)", "\x1b[33m(raylet)\x1b[0m"), "\n", "sh", "ort\nnot ended"):
            stdout.write(text)
    more = " (more in up.log)" if folder == "logs" else ""
    assert sink.getvalue().splitlines() == [
        f"(raylet) A worker died or was killed by an unexpected system error{more}",
        "short",
    ]
    if log is not None and folder == "logs":
        assert log.read_text() == f"{DIED}\n"


def test_a_sink_that_is_closed_ends_nothing() -> None:
    sink = io.StringIO()
    sink.close()
    assert Notes(sink, None).write("a line\n") == 7


def test_the_log_of_a_process_that_ended_is_not_read_out(tmp_path: Path) -> None:
    sink, log = io.StringIO(), tmp_path / "up.log"
    said = ["(raylet) Raylet is terminated", "[state-dump] a table", "[2026-01-01 00:00:00,1 I 1 1] (raylet) a.cc: b"]
    Notes(sink, log).write("".join(f"{line}\n" for line in said))
    assert sink.getvalue().splitlines() == said[:1]
    assert log.read_text().splitlines() == said[1:]
