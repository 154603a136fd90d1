"""Ten times what the service can do: who is accepted is served, who is not is told so at once, nothing stays of it."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator

import grpc.aio
import httpx
import pytest

from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from tests.e2e.paced_service import FULL, INGRESS, Paced, paced_service, rss_mb, say, wait_until
from tests.e2e.traffic import Ask, Got, by_grpc, by_http, random_ask, tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(600 if FULL else 300)]

DURATION_S = 60.0 if FULL else 10.0
N_REPLICAS, BATCH, MAX_WAITING = 2, 8, 16
ITERATION_MS, N_TOKENS = 20.0, 40
CAPACITY = N_REPLICAS * BATCH / (N_TOKENS * ITERATION_MS / 1000)
"""Requests a second, at the very most: an iteration takes a little longer than it is told to."""
OVER = 10
N_HTTP_OF = 8
"""One in so many comes over HTTP."""
MEMORY_MB = 40.0
GAUGES = ("slots_reserved", "slots_used", "queued_slots", "waiting_requests", "running_requests")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paced]:
    args = (
        f"engine: {{device: cpu, n_slots: 16384, max_model_len: 1024, max_batch_size: {BATCH}}}",
        f"replicas: {{min: {N_REPLICAS}, max: {N_REPLICAS}, num_cpus: 1, load_report_interval_s: 0.5}}",
        f"limits: {{max_waiting_requests: {MAX_WAITING}}}",
        "drain: {timeout_s: 30}",
    )
    with paced_service(tmp_path_factory.mktemp("overload"), ITERATION_MS, *args) as running:
        running.settle(N_REPLICAS)
        yield running


def ask_all(service: Paced, asks: list[Ask], interval_s: float, n_http_of: int) -> tuple[list[Got], list[float]]:
    """All of them, one every so many seconds whatever becomes of those before; and the ingress's memory meanwhile."""
    (ingress,) = service.pids(INGRESS)

    async def offer() -> tuple[list[Got], list[float]]:
        memory: list[float] = []
        channel = grpc.aio.insecure_channel(service.server.target)
        limits = httpx.Limits(max_connections=None)
        async with channel, httpx.AsyncClient(base_url=service.url, timeout=180, limits=limits) as client:
            stub = OrcaServiceStub(channel)
            await stub_is_ready(channel)
            tasks, began = [], time.monotonic()
            for number, ask in enumerate(asks):
                await asyncio.sleep(began + number * interval_s - time.monotonic())
                by = by_http(client, ask) if n_http_of and number % n_http_of == 0 else by_grpc(stub, ask)
                tasks.append(asyncio.create_task(by))
                if number % 50 == 0:
                    memory.append(rss_mb(ingress))
            return list(await asyncio.gather(*tasks)), memory

    return asyncio.run(offer())


async def stub_is_ready(channel: grpc.aio.Channel) -> None:
    await asyncio.wait_for(channel.channel_ready(), 60)


def test_a_burst_is_shared_evenly(service: Paced) -> None:
    """Eight requests in ten milliseconds on two idle replicas."""
    service.settle(N_REPLICAS)
    rng = random.Random(5)
    done, _ = ask_all(service, [random_ask(rng, (N_TOKENS, N_TOKENS)) for _ in range(8)], 0.00125, 0)
    assert [got.fault() for got in done] == [""] * 8
    shares = sorted([got.replica for got in done].count(name) for name in {got.replica for got in done})
    assert shares in ([4, 4], [3, 5])
    say("burst", shares=shares)


def test_what_is_too_much_is_refused_and_leaves_no_trace(service: Paced) -> None:
    tokenizer()
    rng = random.Random(6)
    n = int(OVER * CAPACITY * DURATION_S)
    asks = [random_ask(rng, (N_TOKENS, N_TOKENS)) for _ in range(n)]
    counters_before = dict(service.status().counters)
    began = time.monotonic()
    done, memory = ask_all(service, asks, 1 / (OVER * CAPACITY), N_HTTP_OF)
    took_s = time.monotonic() - began

    served = [got for got in done if not got.fault()]
    refused = [got for got in done if got.fault()]
    assert {got.fault().partition(":")[0] for got in refused} <= {"RESOURCE_EXHAUSTED", "429"}
    assert {got.face for got in refused} == {got.face for got in served} == {"grpc", "http"}
    assert all(got.retry_s is not None and 0 < got.retry_s <= 60 for got in refused)
    assert len(served) >= N_REPLICAS * BATCH + MAX_WAITING
    assert len(refused) > len(served)
    waits = sorted(got.seconds for got in refused)
    p50, p99 = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    # the order of magnitude: a refusal is no answer that had to wait for its turn
    assert p50 < 1.0
    quarter = len(memory) // 4
    growth_mb = statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])
    assert growth_mb < MEMORY_MB

    service.settle(N_REPLICAS)
    counters = {name: value - counters_before.get(name, 0) for name, value in service.status().counters.items()}
    assert counters["requests"] == n
    assert (counters["requests_length"], counters["requests_error"]) == (len(served), len(refused))
    assert counters["generated_tokens"] == N_TOKENS * len(served)
    assert not counters.get("resumes")
    assert not counters.get("requests_cancelled")
    wait_until("gauges at zero", lambda: not any(service.metric(f"orca_{name}") for name in GAUGES))
    again, _ = ask_all(service, asks[:4], 0.0, 2)
    assert [got.fault() for got in again] == [""] * 4
    say("overload", offered_per_s=round(n / took_s, 1), capacity_per_s=CAPACITY, served=len(served),
        refused=len(refused), refused_p50_ms=round(p50 * 1000, 1), refused_p99_ms=round(p99 * 1000, 1),
        memory_mb=[round(memory[0]), round(memory[-1])], growth_mb=round(growth_mb, 1),
        served_after_s=round(max(got.seconds for got in again), 2))  # fmt: skip
