"""What the tests of the serving plane share: planes that are closed at their end, and what must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from orca_core.types import FinishReason
from tests.deployment.far_replicas import FarReplicas
from tests.deployment.plane import Client, Clock, Plane, replicas_of
from tests.deployment.stepping import answer_of

Make = Callable[..., Plane]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Plane] = []

    def plane(replicas: FarReplicas, clock: Clock | None = None, **given: Any) -> Plane:
        made.append(Plane(replicas, clock or Clock(), prefix="r" if not made else f"p{len(made)}-", **given))
        return made[-1]

    yield plane
    for each in made:
        await each.close()


async def ready(make: Make, *names: str, n_slots: int = 128, max_batch_size: int = 16, **given: Any) -> Plane:
    plane = make(
        replicas_of(*names, n_slots=n_slots, max_batch_size=max_batch_size), max_batch_size=max_batch_size, **given
    )
    await plane.poll()
    return plane


def where(plane: Plane) -> Counter[str]:
    """How many requests run on which replica."""
    return Counter({name: len(far.engine.running) for name, far in plane.replicas.all.items()})


def assert_undisturbed(client: Client, resumes: int = 0) -> None:
    """It has got every token and every letter, once, and an end that counts them all."""
    expected = answer_of(client.stream._request)
    assert client.error is None
    assert client.tokens == expected
    assert client.text == "".join(f"{token_id} " for token_id in expected)
    last = client.got[-1]
    assert last.chunk.finish_reason is FinishReason.LENGTH
    assert last.chunk.usage is not None
    assert last.chunk.usage.completion_tokens == len(expected)
    assert last.resumes == resumes
