"""The collector has nothing to do with what was loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from deployment.garbage import spare_what_is_loaded


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Ring:
    """Garbage that only the collector finds."""

    n_alive = 0

    def __init__(self) -> None:
        self.self = self
        Ring.n_alive += 1

    def __del__(self) -> None:
        Ring.n_alive -= 1


@pytest.mark.usefixtures("as_before")
def test_what_is_loaded_is_not_looked_at_and_what_comes_later_is() -> None:
    Ring()
    spare_what_is_loaded()
    assert Ring.n_alive == 0  # what was garbage already does not stay for ever
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1000
    Ring()
    gc.collect()
    assert Ring.n_alive == 0
