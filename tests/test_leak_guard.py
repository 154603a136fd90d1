"""The guard of ``conftest.py`` is itself held to its word: leaks fail, clean tests pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
TESTS = """
import asyncio, concurrent.futures, threading

stop = threading.Event()

def test_leaves_a_thread():
    threading.Thread(target=stop.wait, name="left", daemon=True).start()

async def test_leaves_a_task():
    leaves.task = asyncio.create_task(asyncio.Event().wait(), name="left")

def leaves(): ...

def test_cleans_up_a_thread():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

async def test_cleans_up_a_task():
    task = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    task.cancel()

async def test_uses_the_loop_s_own_executor():
    await asyncio.to_thread(lambda: None)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("guarded")
    guard = CONFTEST.read_text().replace("THREAD_END_S = 5.0", "THREAD_END_S = 0.05")
    (folder / "conftest.py").write_text(guard)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nmarkers =\n    e2e: x\n    gpu: x\n")
    shutil.copytree(folder, folder / "e2e", ignore=shutil.ignore_patterns("pytest.ini", "conftest.py", "e2e"))
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", ["test_leaves_a_thread", "test_leaves_a_task"])
def test_a_leak_fails(outcome: str, name: str) -> None:
    assert f"ERROR test_it.py::{name}" in outcome, outcome
    assert "survive the test: left" in outcome


@pytest.mark.parametrize(
    "name", ["test_cleans_up_a_thread", "test_cleans_up_a_task", "test_uses_the_loop_s_own_executor"]
)
def test_a_clean_test_passes(outcome: str, name: str) -> None:
    assert f"PASSED test_it.py::{name}" in outcome, outcome
    assert f"ERROR test_it.py::{name}" not in outcome


def test_end_to_end_tests_are_not_guarded_and_come_last(outcome: str) -> None:
    assert "ERROR e2e/test_it.py" not in outcome, outcome
    assert outcome.index("PASSED test_it.py::test_cleans_up_a_thread") < outcome.index(
        "PASSED e2e/test_it.py::test_cleans_up_a_thread"
    )
