"""What is counted, where, and that the numbers add up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from deployment.auth import ApiKeys
from deployment.config import AppConfig
from deployment.grpc_messages import call_from_pb
from deployment.ingress import Ingress
from deployment.metrics import SPECS, RayRegistry, ReplicaMetrics
from deployment.openai_requests import parse_chat
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.replica import Replica
from deployment.serving import GenerationCall, ServedChunk
from orca_core.errors import DeadlineExceededError, InternalError, OrcaError, OverloadedError, UnauthenticatedError
from orca_core.types import GenerationRequest, SamplingParams
from tests.deployment.fake_registry import FakeRegistry
from tests.deployment.plane import replicas_of, settle
from tests.deployment.serving_fakes import ByteTokenizer, FakeReplicas
from tests.deployment.stepping import SteppingEngine

CONTRACT = {
    "orca_requests_total": ("outcome", "api"), "orca_prompt_tokens_total": (), "orca_generated_tokens_total": (),
    "orca_time_to_first_token_seconds": (), "orca_time_per_output_token_seconds": (), "orca_queue_time_seconds": (),
    "orca_request_seconds": (), "orca_slots_total": (), "orca_slots_reserved": (), "orca_slots_used": (),
    "orca_queued_slots": (), "orca_waiting_requests": (), "orca_running_requests": (), "orca_headroom_slots": (),
    "orca_iterations_total": (), "orca_iteration_seconds": (), "orca_iteration_requests": (),
    "orca_iteration_tokens": (), "orca_failovers_total": (), "orca_rejected_total": ("reason",),
    "orca_failed_total": ("reason",),
    "orca_prefix_cache_hit_tokens_total": (), "orca_load_report_age_seconds": (),
}  # fmt: skip
"""Names and labels that dashboards depend on."""


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
async def ingress(replicas: FakeReplicas, clock: Clock, registry: FakeRegistry) -> AsyncIterator[Ingress]:
    made = Ingress(
        AppConfig.parse({"failover": {"max_resumes": 0}}), replicas, ByteTokenizer(), clock, registry=registry
    )
    yield made
    made.close()


def a_call(n: int = 3, **given: Any) -> GenerationCall:
    return GenerationCall(**{"sampling": SamplingParams(max_new_tokens=n), "prompt": "hello", "api": "grpc", **given})


async def read(ingress: Ingress, call: GenerationCall) -> list[ServedChunk]:
    async with aclosing(ingress.generate(call)) as stream:
        return [served async for served in stream]


# ---- the list


def test_the_metrics_are_those_that_were_promised() -> None:
    assert {spec.name for spec in SPECS} == set(CONTRACT)
    for spec in SPECS:
        assert set(CONTRACT[spec.name]) <= set(spec.tags)
        assert spec.description.endswith(".")
        assert (spec.kind == "counter") == (spec.name.endswith("_total") and spec.name != "orca_slots_total")
        assert list(spec.boundaries) == sorted(set(spec.boundaries))
        assert (spec.kind == "histogram") == bool(spec.boundaries)
        assert all(bound > 0 for bound in spec.boundaries)


def test_rays_metrics_take_our_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import metrics

    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics.Metric, "_record", lambda self, value, tags=None: recorded.append((self._name, value)))
    for spec in SPECS:
        record = RayRegistry().make(spec)
        record(2.0, **dict.fromkeys(spec.tags, "x"))
        if spec.kind == "counter":
            record(0.0, **dict.fromkeys(spec.tags, "x"))  # which Ray would refuse
    assert recorded == [(spec.name, 2.0) for spec in SPECS]


# ---- the ingress


async def test_a_request_that_finishes(ingress: Ingress, registry: FakeRegistry, replicas: FakeReplicas,
                                       clock: Clock) -> None:  # fmt: skip
    async with aclosing(ingress.generate(a_call())) as stream:
        clock.now += 0.25
        await anext(stream)
        clock.now += 2.0
        async for _ in stream:
            pass
    assert registry.of("orca_requests_total", outcome="length", api="grpc") == [1]
    assert registry.total("orca_prompt_tokens_total") == 5
    assert registry.total("orca_generated_tokens_total") == 3
    # the wait for its first chunk began before the clock was moved: generators run when they are read
    assert registry.of("orca_time_to_first_token_seconds") == [0.0]
    assert registry.of("orca_request_seconds") == [2.0]
    assert registry.of("orca_time_per_output_token_seconds") == [1.0]  # two tokens in two seconds
    assert not registry.of("orca_rejected_total")


async def test_one_token_has_no_time_per_token(ingress: Ingress, registry: FakeRegistry) -> None:
    await read(ingress, a_call(1))
    assert registry.of("orca_time_to_first_token_seconds") == [0.0]
    assert not registry.of("orca_time_per_output_token_seconds")


async def test_the_books_balance_whatever_becomes_of_requests(
    ingress: Ingress, registry: FakeRegistry, replicas: FakeReplicas
) -> None:
    """Field case I4: what was aborted is in the count of requests, and its tokens are in no bill."""
    told = []
    for n in (1, 3, 4):
        told.append((await read(ingress, a_call(n, api="http")))[-1].chunk.usage)
    replicas.n_free = 1
    for _ in range(5):
        async with aclosing(ingress.generate(a_call())) as stream:
            await anext(stream)
    replicas.n_free = 10**9
    for error in (DeadlineExceededError(1.0), OverloadedError("full", 1.0), InternalError("r")):
        replicas.submit_error = error
        with pytest.raises(OrcaError):
            await read(ingress, a_call())
    replicas.submit_error = None
    replicas.cut_after, replicas.error = 1, ValueError("after a token")
    with pytest.raises(OrcaError):
        await read(ingress, a_call())
    with pytest.raises(OrcaError):
        await read(ingress, a_call(model="other"))
    outcomes = registry.by_tag("orca_requests_total", "outcome")
    assert outcomes == {"length": 3, "cancelled": 5, "deadline": 1, "error": 4}
    assert registry.by_tag("orca_requests_total", "api") == {"http": 3, "grpc": 10}
    assert registry.by_tag("orca_rejected_total", "reason") == {"overloaded": 1, "not_found": 1}
    # the other two of the four errors: what an alert may wake somebody for
    assert registry.by_tag("orca_failed_total", "reason") == {"internal": 1, "unavailable": 1}
    assert registry.total("orca_prompt_tokens_total") == sum(usage.prompt_tokens for usage in told if usage)
    assert registry.total("orca_generated_tokens_total") == sum(usage.completion_tokens for usage in told if usage)
    assert len(registry.of("orca_request_seconds")) == 13
    counters = (await ingress.status()).counters
    assert counters["requests"] == sum(outcomes.values())
    assert {name: counters[f"requests_{name}"] for name in outcomes} == outcomes
    assert counters["generated_tokens"] == registry.total("orca_generated_tokens_total")


async def test_choices_that_are_refused_together_are_a_refusal(ingress: Ingress, registry: FakeRegistry) -> None:
    with pytest.raises(OrcaError):
        await ingress.check([a_call(), a_call(model="other")])
    with pytest.raises(OrcaError):
        await ingress.check([a_call(50)] * 10_000)
    assert registry.by_tag("orca_rejected_total", "reason") == {"not_found": 1, "invalid_request": 1}
    assert not registry.of("orca_requests_total")


async def test_a_caller_without_a_key_is_refused_and_no_request(
    replicas: FakeReplicas, registry: FakeRegistry, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    ingress = Ingress(AppConfig(), replicas, ByteTokenizer(), keys=ApiKeys(tmp_path / "keys"), registry=registry)
    with pytest.raises(UnauthenticatedError):
        ingress.keys.check([])
    ingress.keys.check(["Bearer sk-1"])
    assert registry.by_tag("orca_rejected_total", "reason") == {"unauthenticated": 1}
    ingress.close()


def test_each_face_says_which_it_is() -> None:
    assert call_from_pb(pb.GenerateRequest(prompt="x"), None).api == "grpc"
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert {call.api for call in parse_chat(body, AppConfig().limits, "r").calls} == {"http"}


# ---- a replica


async def test_gauges_follow_the_load_and_return_to_zero(registry: FakeRegistry) -> None:
    """Field case I3."""
    engine = SteppingEngine()
    replica = Replica(engine, "r1", metrics=ReplicaMetrics(registry, "r1"))
    engine.submit(GenerationRequest("a", (1, 2), 3, 0))
    await replica.report("i")
    for _ in range(3):
        engine.step()
    await replica.report("i")
    assert registry.of("orca_slots_reserved", replica="r1") == [5, 0]
    assert registry.of("orca_running_requests") == [1, 0]
    assert registry.of("orca_headroom_slots") == [123, 128]
    assert registry.of("orca_slots_total") == [128, 128]
    for name in ("orca_slots_used", "orca_queued_slots", "orca_waiting_requests"):
        assert registry.of(name)[-1] == 0


async def test_the_line_of_an_ingress_is_what_waits(registry: FakeRegistry, clock: Clock) -> None:
    far = replicas_of("a", n_slots=20)
    ingress = Ingress(AppConfig(), far, ByteTokenizer(), clock, registry=registry)
    await ingress.model()
    calls = [a_call(9, prompt=None, token_ids=(1, 2, 3, 4, 5)) for _ in range(3)]
    tasks = [asyncio.create_task(read(ingress, call)) for call in calls]
    await settle()
    clock.now += 2.0
    await ingress.status()
    assert registry.of("orca_waiting_requests", replica="ingress")[-1] == 2
    assert registry.of("orca_queued_slots", replica="ingress")[-1] == 28
    while not all(task.done() for task in tasks):
        far.all["a"].engine.step()
        await settle()
    await ingress.status()
    assert registry.of("orca_waiting_requests", replica="ingress")[-1] == 0
    # the first found room at once, and what an engine says of itself is in it
    assert sorted(registry.of("orca_queue_time_seconds")) == [pytest.approx(0.1), 2.0, 2.0]
    assert registry.of("orca_load_report_age_seconds")[0] == 0.0
    ingress.close()
    far.close()


async def test_a_stream_that_goes_on_elsewhere_is_a_failover(registry: FakeRegistry, clock: Clock) -> None:
    far = replicas_of("a", "b")
    ingress = Ingress(AppConfig(), far, ByteTokenizer(), clock, registry=registry)
    await ingress.model()
    task = asyncio.create_task(read(ingress, a_call(9, prompt=None, token_ids=(1, 2, 3, 4, 5))))
    await settle()
    next(each for each in far.all.values() if each.engine.running).kill()
    while not task.done():
        for each in far.all.values():
            each.engine.step()
        await settle()
    assert registry.total("orca_failovers_total") == 1
    assert (await ingress.status()).counters["resumes"] == 1
    ingress.close()
    far.close()
