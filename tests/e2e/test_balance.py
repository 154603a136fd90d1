"""Whether ingresses that know nothing of each other spread work evenly, over as many replicas as there is work for."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc.aio
import pytest

from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from tests.e2e.paced_service import FULL, Paced, paced_service, say, wait_until
from tests.e2e.traffic import Ask, Got, by_grpc, random_ask, tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(600 if FULL else 400)]

MIN, RIGHT, MAX = 1, 4, 6
BATCH, N_SLOTS = 16, 524_288
N_REQUESTS = 48
"""Three full batches, which is four at the ratio aimed for."""
MAX_SKEW = 1.5
N_LASTING = 800
"""Tokens of streams that are still open when replicas leave."""
SCALE_TIMEOUT_S = 180.0
STEADY_S, MAX_CHANGES = 300.0 if FULL else 20.0, 2


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paced]:
    args = (
        # so many slots that places in the batch are what there is too little of
        f"engine: {{device: cpu, n_slots: {N_SLOTS}, max_model_len: 8192, max_batch_size: {BATCH}}}",
        f"limits: {{max_waiting_slots: {N_SLOTS}}}",
        f"replicas: {{min: {MIN}, max: {MAX}, num_cpus: 1, load_report_interval_s: 0.5}}",
        "autoscaling: {upscale_delay_s: 2, downscale_delay_s: 5, interval_s: 0.5, target_queued_slots_ratio: 0.8}",
        "ingress: {replicas: 3}",
        "drain: {timeout_s: 30}",
    )
    with paced_service(tmp_path_factory.mktemp("balance"), 25.0, *args) as running:
        yield running


def n_replicas(service: Paced) -> int:
    return len(service.status().replicas)


def targets(service: Paced) -> list[int]:
    """All numbers of replicas the autoscaler has gone to, in order."""
    (line,) = [line for line in service.server.log.read_text().splitlines() if line.startswith("logs: ")]
    logs = sorted(Path(line.removeprefix("logs: ")).glob("controller_*.log"))
    said = "".join(log.read_text() for log in logs)
    return [int(number) for number in re.findall(r"autoscaling Replica: \d+ -> (\d+) replicas", said)]


def begin(service: Paced, n_tokens: int) -> grpc.Call:
    """A stream that is open until somebody reads it or cancels it."""
    sampling = pb.Sampling(max_new_tokens=n_tokens, ignore_eos=True, seed=1)
    return service.server.stub.Generate(pb.GenerateRequest(prompt="Hello", sampling=sampling), timeout=300)


def all_at_once(service: Paced, asks: list[Ask]) -> list[Got]:
    async def ask_all() -> list[Got]:
        async with grpc.aio.insecure_channel(service.server.target) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
            stub = OrcaServiceStub(channel)
            return list(await asyncio.gather(*(by_grpc(stub, ask) for ask in asks)))

    return asyncio.run(ask_all())


def skew(done: list[Got]) -> tuple[float, list[int]]:
    """(largest share over smallest, all shares) of the demand in slots, by replica."""
    demand: Counter[str] = Counter()
    for got in done:
        demand[got.replica] += len(got.ask.prompt) + got.ask.n_tokens
    return max(demand.values()) / min(demand.values()), sorted(demand.values())


def test_replicas_follow_the_queue_and_share_the_work(service: Paced) -> None:
    """Field cases F2 and F4. One replica, then as many as there is work for and no more, then one; no stream is cut."""
    tokenizer()
    assert n_replicas(service) == MIN
    with ThreadPoolExecutor(4) as pool:
        load = [begin(service, 8000) for _ in range(N_REQUESTS)]
        up_s = wait_until("the right number", lambda: n_replicas(service) == RIGHT, SCALE_TIMEOUT_S)
        # those that waited go to the new replicas, and a number that was right once stays so
        wait_until("all of them run", lambda: n_running(service) == N_REQUESTS, 60)
        held = [n_replicas(service) for _ in range(20)]
        for stream in load:
            stream.cancel()
        service.settle(RIGHT)  # every ingress has heard of it

        # at the same instant, while there are still four: three ingresses that each know a third of it
        rng = random.Random(4)
        asks = [random_ask(rng, (200, 250)) for _ in range(N_REQUESTS)]
        done = all_at_once(service, asks)
        ratio, shares = skew(done)
        assert [fault for got in done if (fault := got.fault())] == []

        # what is open while replicas leave is not cut
        lasting = [begin(service, N_LASTING) for _ in range(4)]
        ends = [pool.submit(list, stream) for stream in lasting]
        down_s = wait_until("back to the fewest", lambda: n_replicas(service) == MIN, SCALE_TIMEOUT_S)
        for end in ends:
            messages = end.result()
            assert messages[-1].finish_reason == pb.LENGTH
            assert sum(len(message.token_ids) for message in messages) == N_LASTING
            assert not messages[-1].resumes
    assert set(held) == {RIGHT}
    assert len(shares) == RIGHT, shares
    assert ratio <= MAX_SKEW, shares
    went_to = targets(service)
    assert (max(went_to), went_to[-1]) == (RIGHT, MIN), went_to
    peak = went_to.index(RIGHT)
    assert went_to[:peak] == sorted(went_to[:peak]), went_to
    service.settle(MIN)
    say("scaling", up_s=round(up_s, 1), down_s=round(down_s, 1), went_to=went_to, skew=round(ratio, 2), shares=shares)


def n_running(service: Paced) -> int:
    return sum(replica.load.running for replica in service.status().replicas)


def test_a_steady_load_just_above_one_replica_changes_their_number_little(service: Paced) -> None:
    """Field case F4, over five minutes in the long form."""
    before = len(targets(service))
    done = asyncio.run(keep_up(service.server.target, BATCH + 2, STEADY_S))
    assert [fault for got in done if (fault := got.fault())] == []
    went_to = targets(service)[before:]
    assert 1 <= len(went_to) <= MAX_CHANGES, went_to
    say("steady", seconds=STEADY_S, streams=len(done), went_to=went_to)
    wait_until("back to the fewest", lambda: n_replicas(service) == MIN, SCALE_TIMEOUT_S)
    service.settle(MIN)


async def keep_up(target: str, n_at_once: int, seconds: float) -> list[Got]:
    """So many streams at any time, for so long: whenever one ends, the next one begins."""
    rng, loop = random.Random(5), asyncio.get_running_loop()
    until = loop.time() + seconds
    async with grpc.aio.insecure_channel(target) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        stub = OrcaServiceStub(channel)

        async def one_after_the_other() -> list[Got]:
            done = []
            while loop.time() < until:
                done.append(await by_grpc(stub, random_ask(rng, (60, 120))))
            return done

        return [
            got for done in await asyncio.gather(*(one_after_the_other() for _ in range(n_at_once))) for got in done
        ]
