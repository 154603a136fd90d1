"""What holds for every test: one torch thread, no network, and nothing that is started survives its test."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# before any library reads them: a test that reaches for a hub fails at once, and nobody draws bars into the log
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# a shell has what it starts in the background ignore it, and so would the processes that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

E2E_TIMEOUT_S = 300.0
THREAD_END_S = 5.0
"""Seconds a thread that was told to end may take to do so."""

_LIBRARY_THREADS = (
    "pytest_timeout",  # the timer of the test itself
    "asyncio_",  # the default executor of a loop: joined when the loop is closed, after this check
    "asyncio-waitpid-",
    "AnyIO worker thread",  # parked for reuse, end with their loop
    "OpenCensus",
    "OpenTelemetry",
    "ray_",
)
"""Name prefixes of threads that libraries keep for themselves for as long as the process lives."""
_LIBRARY_TARGETS = (
    "_poll_wrapper",  # grpc.aio's one poller
    "channel_spin",  # grpc's sync channels
    "_poll_connectivity",
    "_delivery",
)
"""Functions of library threads without a name of their own: threading calls those ``Thread-3 (function)``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies under ``tests/e2e`` and give it time; unit tests run first."""
    root = Path(__file__).parent / "e2e"
    for item in items:
        if root in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need what this machine lacks."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread(request: pytest.FixtureRequest) -> None:
    """Tiny models are faster on one thread, and sums don't depend on how many there are."""
    if all(item.get_closest_marker("e2e") is not None for item in request.session.items):
        return
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that leaves a thread or an asyncio task behind.

    Threads of module- or session-wide fixtures are started before this one and so are not the test's own.
    """
    if request.node.get_closest_marker("e2e") is not None:
        yield
        return
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_task_survives")
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not _is_library_thread(thread)]
    for thread in left:
        thread.join(THREAD_END_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads survive the test: {', '.join(alive)}"


@pytest.fixture
async def _no_task_survives() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(10):  # a task that was cancelled needs a turn or two of the loop to end
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    alive = [task.get_name() + " " + getattr(task.get_coro(), "__qualname__", "") for task in left if not task.done()]
    assert not alive, f"tasks survive the test: {', '.join(alive)}"


def _is_library_thread(thread: threading.Thread) -> bool:
    if thread.name.startswith(_LIBRARY_THREADS):
        return True
    return any(f"({target})" in thread.name for target in _LIBRARY_TARGETS)
