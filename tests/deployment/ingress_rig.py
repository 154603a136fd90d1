"""What tests of the ingress have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.peers import IngressShare, Shares
from deployment.serving import GenerationCall, ServedChunk
from orca_core.types import CancelOutcome, SamplingParams
from tests.deployment.plane import settle
from tests.deployment.serving_fakes import ByteTokenizer, FakeReplicas

FEW = SamplingParams(max_new_tokens=3)
CONFIG = AppConfig.parse(
    {"model": {"id": "our-name"}, "limits": {"max_prompt_bytes": 100, "max_stop_strings": 2, "max_waiting_slots": 640}}
)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def a_call(**given: Any) -> GenerationCall:
    return GenerationCall(**{"sampling": FEW, "prompt": "hello", **given})


async def read(ingress: Ingress, call: GenerationCall) -> list[ServedChunk]:
    async with aclosing(ingress.generate(call)) as stream:
        return [served async for served in stream]


async def counters(ingress: Ingress) -> dict[str, int]:
    return (await ingress.status()).counters


async def streams_of(ingress: Ingress, *calls: GenerationCall) -> list[asyncio.Task[list[ServedChunk]]]:
    tasks = [asyncio.create_task(read(ingress, call)) for call in calls]
    await settle()
    return tasks


def of_tokens(max_new_tokens: int = 9, **given: Any) -> GenerationCall:
    """Without a text no thread has to be waited for."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=4)
    return a_call(prompt=None, token_ids=(1, 2, 3, 4, 5), sampling=sampling, **given)


class FakePeers:
    """All ingresses, the one under test (``own``) among them; ``n_known`` less what ``shares`` says hang."""

    def __init__(self, *shares: IngressShare, n_known: int = 1) -> None:
        self.others = list(shares)
        self.n_known = n_known
        self.asked: list[str] = []
        self.own: Ingress | None = None

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        self.asked.append(client_request_id)
        return CancelOutcome.CANCELLED

    async def shares(self) -> Shares:
        own = [] if self.own is None else [await self.own.share()]
        return Shares([*self.others, *own], self.n_known)


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def last_chance(replicas: FakeReplicas, clock: Clock) -> AsyncIterator[Ingress]:
    """An ingress that resumes nothing."""
    made = Ingress(AppConfig.parse({"failover": {"max_resumes": 0}}), replicas, ByteTokenizer(), clock)
    yield made
    made.close()


@pytest.fixture
async def ingress(replicas: FakeReplicas, clock: Clock) -> AsyncIterator[Ingress]:
    made = Ingress(CONFIG, replicas, ByteTokenizer(), clock)
    yield made
    made.close()
