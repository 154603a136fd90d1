"""Both clients against the real gRPC face over a fake service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from deployment.client import AsyncOrcaClient, OrcaClient
from deployment.client_messages import ClientChunk
from orca_core.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OrcaError,
    OverloadedError,
    RequestTooLargeError,
    UnavailableError,
)
from orca_core.types import CancelOutcome, FinishReason, Timings, Usage
from tests.deployment.fake_service import MODEL, WORDS
from tests.deployment.grpc_server import FakeIngress, serving

TEXT = "".join(WORDS)


@pytest.fixture
def service() -> FakeIngress:
    return FakeIngress()


@pytest.fixture
def address(service: FakeIngress) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[OrcaClient]:
    with OrcaClient(address) as client:
        yield client


def test_stream(client: OrcaClient, service: FakeIngress) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0.5, "stop": "END", "seed": 2**64 - 1}
    chunks = list(client.generate("Hi", request_id="mine", **sampling))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [token for chunk in chunks for token in chunk.token_ids] == [0, 1, 2, 3, 4]
    last = chunks[-1]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (last.finish_reason, last.usage, last.timings) == (FinishReason.STOP, Usage(3, 5, 1), Timings(0.1, 0.2, 0.3))
    assert (last.request_id, last.replica, last.resumes, last.stop) == ("mine", "r1", 0, None)
    call = service.calls[0]
    assert (call.prompt, call.client_request_id, call.timeout_s) == ("Hi", "mine", None)
    assert (call.sampling.temperature, call.sampling.stop, call.sampling.seed) == (0.5, ("END",), 2**64 - 1)


def test_greedy_unless_told_otherwise(client: OrcaClient, service: FakeIngress) -> None:
    client.complete("Hi")
    assert service.calls[0].sampling.temperature == 0.0


def test_complete_and_the_other_inputs(client: OrcaClient, service: FakeIngress) -> None:
    whole = client.complete(token_ids=[1, 2], logprobs=2)
    assert (whole.text, whole.finish_reason, len(whole.logprobs)) == (TEXT, FinishReason.STOP, 5)
    assert whole.logprobs[0].chosen.bytes == b"Hello"
    client.complete(messages=[{"role": "user", "content": "Hi"}])
    assert service.calls[0].token_ids == (1, 2)
    assert [(m.role, m.content) for m in service.calls[1].messages or ()] == [("user", "Hi")]


def test_plain_calls(client: OrcaClient) -> None:
    assert client.tokenize("AB") == [65, 66]
    assert client.detokenize([0, 1]) == "AB"
    assert client.cancel("other") is CancelOutcome.NOT_FOUND
    assert client.model() == MODEL
    status = client.status()
    assert (status.replicas[0].load.headroom, status.waiting_requests, status.counters) == (146, 2, {"requests": 7})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": "a", "token_ids": [1]},
        {"token_ids": ["x"]},
        {"token_ids": [2**40]},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "max_new_tokens": 2**40},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "a", "timeout_s": 0},
        {"prompt": "a", "timeout_s": float("nan")},
        {"prompt": "a", "request_id": 3},
        {"prompt": "a", "model": b"\xff"},
        {"prompt": "a", "session_id": "\ud800"},
    ],
)
def test_what_cannot_be_sent(client: OrcaClient, service: FakeIngress, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        client.generate(**arguments)  # type: ignore[arg-type]
    assert service.calls == []


def test_what_is_not_text_is_named(client: OrcaClient) -> None:
    for name in ("request_id", "model", "session_id"):
        with pytest.raises(InvalidRequestError) as caught:
            client.complete("Hi", **{name: 3})  # type: ignore[arg-type]
        assert caught.value.field == name


async def test_a_session_is_told(address: str, service: FakeIngress) -> None:
    with OrcaClient(address) as client:
        list(client.generate("Hi", session_id="ours"))
        client.complete("Hi", session_id="ours")
    async with AsyncOrcaClient(address) as client:
        assert [chunk async for chunk in client.generate("Hi", session_id="ours")]
        await client.complete("Hi", session_id="ours")
    assert [call.session_id for call in service.calls] == ["ours"] * 4


PLAIN_CALLS: dict[str, tuple[object, ...]] = {
    "cancel": ("mine",), "tokenize": ("Hi",), "detokenize": ([1],), "model": (), "status": (),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_CALLS)
async def test_every_call_can_be_given_a_deadline(
    address: str, service: FakeIngress, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(service, name, for_ever)
    async with AsyncOrcaClient(address) as client:
        with pytest.raises(DeadlineExceededError):
            await getattr(client, name)(*PLAIN_CALLS[name], timeout_s=0.05)
    with OrcaClient(address) as blocking, pytest.raises(DeadlineExceededError):
        getattr(blocking, name)(*PLAIN_CALLS[name], timeout_s=0.05)


@pytest.mark.parametrize("fail_after", [0, 2])
@pytest.mark.parametrize("error", [OverloadedError("full", 2.5), UnavailableError("lost", 3.0), RuntimeError("secret")])
def test_errors_come_back(error: Exception, fail_after: int) -> None:
    service = FakeIngress(error=error, fail_after=fail_after)
    with serving(service) as address, OrcaClient(address) as client:
        with pytest.raises(OrcaError) as caught:
            list(client.generate("Hi", request_id="mine"))
        if isinstance(error, OrcaError):
            assert (type(caught.value), caught.value.args) == (type(error), error.args)
        else:
            assert (type(caught.value), caught.value.args) == (InternalError, ("mine",))


def test_refusals_keep_their_numbers(client: OrcaClient) -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        list(client.generate("Hi", max_new_tokens=65))
    assert (caught.value.max_new_tokens, caught.value.limit, caught.value.limit_name) == (65, 64, "max_model_len")
    with pytest.raises(NotFoundError, match="'other'"):
        client.complete("Hi", model="other")


def test_a_stream_without_finish_reason_has_failed() -> None:
    with (
        serving(FakeIngress(truncate=True)) as address,
        OrcaClient(address) as client,
        pytest.raises(UnavailableError, match="ended early"),
    ):
        list(client.generate("Hi"))


def test_nobody_there() -> None:
    with serving(FakeIngress()) as address:
        pass
    with OrcaClient(address) as client, pytest.raises(UnavailableError, match=f"no server answers at {address}"):
        client.model()


class GatedIngress(FakeIngress):
    """Gives one token, then waits until it is cancelled."""

    def __init__(self) -> None:
        super().__init__(gate=asyncio.Semaphore(1))
        self.gone = threading.Event()

    async def generate(self, call):  # type: ignore[no-untyped-def,override]
        try:
            async for served in super().generate(call):
                yield served
        finally:
            self.gone.set()


def test_dropping_the_iterator_cancels_the_call() -> None:
    service = GatedIngress()
    with serving(service) as address, OrcaClient(address) as client:
        stream = client.generate("Hi")
        assert next(stream).text == "Hello"
        del stream
        assert service.gone.wait(10)


def test_deadline() -> None:
    service = GatedIngress()
    with serving(service) as address, OrcaClient(address) as client:
        with pytest.raises(DeadlineExceededError, match=r"0\.3"):
            list(client.generate("Hi", timeout_s=0.3))
        assert service.gone.wait(10)
    assert service.calls[0].timeout_s is not None
    assert 0 < service.calls[0].timeout_s <= 0.3


async def test_async_client(service: FakeIngress) -> None:
    with serving(service) as address:
        async with AsyncOrcaClient(address, api_key="k") as client:
            chunks = [chunk async for chunk in client.generate("Hi")]
            assert "".join(chunk.text for chunk in chunks) == TEXT
            assert (await client.complete("Hi")).text == TEXT
            assert await client.model() == MODEL
            assert (await client.status()).waiting_slots == 30
            assert await client.tokenize("A") == [65]
            assert await client.detokenize([0]) == "A"
            assert await client.cancel("x") is CancelOutcome.NOT_FOUND
            with pytest.raises(NotFoundError):
                [chunk async for chunk in client.generate("Hi", model="other")]


N_TRIES = 2000  # a connection is used once it stands, and both are made at the same time


def test_calls_are_spread_over_all_addresses_of_a_name() -> None:
    """As with the headless service of Kubernetes; with gRPC's own default all calls would go to the first address."""
    first, second = FakeIngress(), FakeIngress()
    with serving(first) as one, serving(second) as other, OrcaClient(f"ipv4:{one},{other}") as client:
        for _ in range(N_TRIES):
            client.complete("x")
            if first.calls and second.calls:
                break
    assert first.calls
    assert second.calls


async def test_async_calls_are_spread_too() -> None:
    first, second = FakeIngress(), FakeIngress()
    with serving(first) as one, serving(second) as other:
        async with AsyncOrcaClient(f"ipv4:{one},{other}") as client:
            for _ in range(N_TRIES):
                await client.complete("x")
                if first.calls and second.calls:
                    break
    assert first.calls
    assert second.calls


async def test_async_close_cancels_the_call() -> None:
    service = GatedIngress()
    with serving(service) as address:
        async with AsyncOrcaClient(address) as client:
            stream = client.generate("Hi")
            assert (await anext(stream)).text == "Hello"
            await stream.aclose()
            assert await asyncio.to_thread(service.gone.wait, 10)


def test_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, deployment.client, deployment.cli.main, orca_core.types, orca_core.errors;"
        "print([m for m in ('ray', 'torch', 'transformers', 'pydantic', 'starlette', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_repr_shows_an_answer() -> None:
    shown = repr(ClientChunk("r", "SECRET", (4321,), finish_reason=FinishReason.STOP, stop="SECRET"))
    assert "SECRET" not in shown
    assert "4321" not in shown
    assert "STOP" in shown
