"""What holds for every test of the deployment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """``up`` sets variables for Ray; another test's Ray must not see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
