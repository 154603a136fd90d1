"""The books of an ingress on how much room replicas have, and reports of them."""

from __future__ import annotations

import random

import pytest

from deployment.headroom import HeadroomBook
from deployment.parcels import Standing
from orca_core.types import Load
from tests.deployment.plane import Clock

IDLE = Load(n_slots=1000)


class Teller:
    """Reports of replicas, each newer than the last."""

    def __init__(self, book: HeadroomBook) -> None:
        self.book = book
        self.at = 0.0

    def __call__(self, n_accepted: int = 0, **loads: Load) -> None:
        for replica, load in loads.items():
            self.at += 1.0
            self.book.report(replica, Standing(load, self.at, n_accepted))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> HeadroomBook:
    return HeadroomBook(clock, 100, random.Random(1), stale_after_s=5.0)


@pytest.fixture
def tell(book: HeadroomBook) -> Teller:
    return Teller(book)


def send(book: HeadroomBook, name: str, replicas: list[str], demand: int) -> str:
    """Choose and book."""
    replica = book.best(replicas, demand)
    assert replica is not None
    book.book(name, replica, demand)
    return replica


def full(n: int) -> Load:
    return Load(n_slots=1000, reserved_slots=10 * n, running=n)
