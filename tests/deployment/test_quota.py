"""One API key's part of an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from deployment import live as live_module
from deployment.auth import ApiKeys
from deployment.config import AppConfig
from deployment.http_api import build_app
from deployment.ingress import Ingress
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from deployment.quota import CALLER, Quota
from deployment.serving import GenerationCall
from orca_core.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, RequestTooLargeError
from orca_core.types import SamplingParams
from tests.deployment.fake_service import MODEL, FakeService
from tests.deployment.grpc_server import FakeIngress, serving
from tests.deployment.serving_fakes import ByteTokenizer, FakeReplicas

ONE, TWO = "sk-one-11", "sk-two-22"


@pytest.fixture(autouse=True)
def nobody() -> Any:
    token = CALLER.set("")
    yield
    CALLER.reset(token)


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(f"{ONE}\n{TWO}\n")
    return ApiKeys(file)


def test_a_caller_holds_its_share_and_no_more_and_others_are_not_in_its_way() -> None:
    """Field case D6."""
    quota = Quota(100)
    CALLER.set("one")
    with quota.hold(30, 30), quota.hold(20, 20):
        with pytest.raises(OverloadedError, match="hold 100 of 100 slots"), quota.hold(1, 1):
            pass
        CALLER.set("two")
        with quota.hold(50, 50):
            pass
        CALLER.set("one")
    with quota.hold(50, 50):
        pass
    assert not quota._held


def test_what_the_share_can_never_hold_is_no_matter_of_waiting() -> None:
    CALLER.set("one")
    with pytest.raises(RequestTooLargeError, match=r"limits\.max_slots_per_key 100"), Quota(100).hold(100, 1):
        pass


def test_without_a_limit_or_a_key_nobody_is_refused() -> None:
    with Quota(10).hold(1000, 1000):
        pass
    CALLER.set("one")
    with Quota(None).hold(1000, 1000):
        pass


def test_a_failure_gives_the_share_back() -> None:
    quota = Quota(100)
    CALLER.set("one")
    with pytest.raises(KeyError), quota.hold(50, 50):
        raise KeyError
    with quota.hold(50, 50):
        pass


@pytest.fixture
async def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
async def ingress(replicas: FakeReplicas) -> AsyncIterator[Ingress]:
    made = Ingress(AppConfig.parse({"limits": {"max_slots_per_key": 20}}), replicas, ByteTokenizer())
    yield made
    made.close()


async def test_the_ingress_counts_a_request_from_its_beginning_to_its_end(
    ingress: Ingress, replicas: FakeReplicas
) -> None:
    call = GenerationCall(SamplingParams(max_new_tokens=10), prompt="hello")  # 15 slots
    replicas.n_free = 1
    CALLER.set("one")
    stream = ingress.generate(call)
    await anext(stream)
    with pytest.raises(OverloadedError):
        await anext(ingress.generate(call))
    assert len(replicas.streams) == 1
    await stream.aclose()
    again = ingress.generate(call)
    await anext(again)
    await again.aclose()


async def test_choices_that_no_share_can_ever_hold_are_refused_before_any_of_them_begins(
    ingress: Ingress, replicas: FakeReplicas
) -> None:
    calls = [GenerationCall(SamplingParams(max_new_tokens=4), token_ids=(1, 2, 3))] * 3  # 21 slots
    await ingress.check(calls)  # nobody is told apart
    CALLER.set("one")
    await ingress.check(calls[:2])
    with pytest.raises(InvalidRequestError, match=r"limits\.max_slots_per_key is 20"):
        await ingress.check(calls)
    assert not replicas.streams


async def test_a_reader_that_takes_nothing_holds_nothing_after_its_deadline(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands between two messages, in a write that does not end, and cannot be woken."""
    monkeypatch.setattr(live_module, "READER_GRACE_S", 0.0)
    CALLER.set("one")
    call = GenerationCall(SamplingParams(max_new_tokens=10), token_ids=(1, 2, 3, 4, 5), timeout_s=0.05)
    stream = ingress.generate(call)
    await anext(stream)
    assert ingress._quota._held["one"] == 15
    while len(ingress._live):
        await asyncio.wait_for(asyncio.sleep(0.01), 1)
    assert not ingress._quota._held
    counters = (await ingress.status()).counters
    assert (counters["requests"], counters["requests_deadline"]) == (1, 1)
    assert await ingress.drain() == 0
    with pytest.raises(DeadlineExceededError):  # should it come back
        await anext(stream)
    assert (await ingress.status()).counters == counters


async def test_a_reader_that_comes_back_in_time_is_told_everything(ingress: Ingress) -> None:
    CALLER.set("one")
    call = GenerationCall(SamplingParams(max_new_tokens=3), token_ids=(1, 2, 3, 4, 5), timeout_s=5.0)
    stream = ingress.generate(call)
    served = [await anext(stream)]
    await asyncio.sleep(0)
    served += [each async for each in stream]
    assert served[-1].chunk.finish_reason is not None
    counters = (await ingress.status()).counters
    assert (counters["requests"], counters.get("requests_deadline", 0)) == (1, 0)
    assert not ingress._quota._held


class Noting(FakeService):
    """Remembers who called."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    async def generate(self, call: GenerationCall) -> Any:
        self.callers.append(CALLER.get())
        async for served in super().generate(call):
            yield served


class NotingIngress(Noting, FakeIngress):
    """The same, behind gRPC."""


@pytest.mark.parametrize("stream", [False, True])
async def test_http_names_the_caller_not_the_key(keys: ApiKeys, stream: bool) -> None:
    service = Noting()
    transport = httpx.ASGITransport(build_app(service, keys=keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": MODEL.model_id, "prompt": "Hi", "n": 2, "temperature": 1, "stream": stream}
        for key in (ONE, TWO, ONE):
            await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert len(service.callers) == 6
    check_names(service.callers[::2])
    assert service.callers[::2] == service.callers[1::2]


async def test_grpc_names_the_caller_not_the_key(keys: ApiKeys) -> None:
    service = NotingIngress()
    service.keys = keys
    with serving(service) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = OrcaServiceStub(channel)
            for key in (ONE, TWO, ONE):
                metadata = (("authorization", f"Bearer {key}"),)
                await stub.Complete(pb.GenerateRequest(prompt="Hi"), metadata=metadata)
            _ = [m async for m in stub.Generate(pb.GenerateRequest(prompt="Hi"), metadata=metadata)]
    check_names(service.callers[:3])
    assert service.callers[3] == service.callers[0]


def check_names(names: list[str]) -> None:
    """Of the first key, the second, the first again."""
    assert names[0] == names[2] != names[1]
    assert all(names)
    assert not any(key in name for key in (ONE, TWO) for name in names)


async def test_two_tasks_do_not_see_each_others_caller() -> None:
    async def call(name: str) -> str:
        CALLER.set(name)
        await asyncio.sleep(0)
        return CALLER.get()

    assert await asyncio.gather(call("a"), call("b")) == ["a", "b"]
