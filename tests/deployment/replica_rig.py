"""A replica over an engine that computes when told, and one ingress's stream from it."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator

import pytest

from deployment.parcels import Accepted, Parcel, Pinned, Rejected
from deployment.replica import Replica
from orca_core.types import GenerationRequest
from tests.deployment.plane import Clock
from tests.deployment.stepping import SteppingEngine

HERE = Pinned("a")


def a_request(request_id: str = "r1", max_new_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2), max_new_tokens, 0)


class Bench:
    """A replica and one ingress's stream from it."""

    def __init__(self, n_slots: int = 128, heartbeat_s: float = 3600.0) -> None:
        self.engine = SteppingEngine(n_slots)
        self.clock = Clock(0.0)
        self.replica = Replica(self.engine, "a", lambda: 12.0, heartbeat_s=heartbeat_s, monotonic=self.clock)

    async def attach(self, ingress: str = "i", link: str = "link") -> AsyncGenerator[Parcel, None]:
        parcels = self.replica.attach(HERE, ingress, link)
        await anext(parcels)
        return parcels

    async def submit(self, request: GenerationRequest, link: str = "link", client: str = "mine") -> Accepted | Rejected:
        answer = self.replica.submit(request, link, client)
        assert pickle.loads(pickle.dumps(answer)) == answer
        return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()
