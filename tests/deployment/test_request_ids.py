"""One request, one id: in its messages, in its error, in its trailers or headers, and in the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2
from ray.serve.grpc_util import RayServegRPCContext

from deployment.errors import as_orca_error
from deployment.grpc_api import Arrived
from deployment.http_api import build_app
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from deployment.serving import GenerationCall, ServedChunk
from orca_core.errors import InternalError, UnavailableError
from tests.deployment.fake_service import FakeService
from tests.deployment.grpc_server import FakeIngress, serving
from tests.deployment.plane import Clock, Plane, replicas_of

SERVES_ID = "1d6c4f3e-serve"
ODD_ID = "größe\n2024 ERROR made up"


class GrpcsContext:
    """What Serve's context is made from, and what it is put on in the end."""

    def __init__(self) -> None:
        self.trailers: list[tuple[str, Any]] = []
        self.status: tuple[Any, str] = (None, "")

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return []

    def trailing_metadata(self) -> tuple[tuple[str, Any], ...]:
        return ()

    def set_trailing_metadata(self, trailers: list[tuple[str, Any]]) -> None:
        self.trailers = trailers

    def set_code(self, code: Any) -> None:
        self.status = (code, self.status[1])

    def set_details(self, details: str) -> None:
        self.status = (self.status[0], details)

    def __getattr__(self, name: str) -> Any:
        return lambda: None


def serves_context() -> RayServegRPCContext:
    """As a method is handed it: with the id that Serve has given the call, which is in Serve's lines of the log."""
    context = RayServegRPCContext(GrpcsContext())
    context.set_trailing_metadata([("request_id", SERVES_ID)])
    return context


def told(context: RayServegRPCContext) -> tuple[str, list[Any], str]:
    """The details, the ids in the trailers, and the id in the rich status, empty where there is none."""
    sent = GrpcsContext()
    context._set_on_grpc_context(sent)
    trailers = dict(sent.trailers)
    ids = [value for key, value in sent.trailers if key == "request_id"]
    if "grpc-status-details-bin" not in trailers:
        return sent.status[1], ids, ""
    return sent.status[1], ids, _named_in(trailers["grpc-status-details-bin"])


def _named_in(status_bytes: bytes) -> str:
    info = error_details_pb2.RequestInfo()
    details = status_pb2.Status.FromString(status_bytes).details
    assert [detail.Unpack(info) for detail in details].count(True) == 1
    return str(info.request_id)


def ask(request_id: str = "", **given: Any) -> Arrived:
    return Arrived(pb.GenerateRequest(prompt="Hi", request_id=request_id, **given), process=-1)


async def run(service: FakeIngress, method: str, arrived: Arrived, context: Any) -> list[str]:
    """The ids of the messages of an RPC, whatever becomes of it."""
    if method == "Complete":
        answer = await service.Complete(arrived, context)
        return [answer.request_id] if answer.request_id else []
    ids = []
    try:
        async for message in service.Generate(arrived, context):
            ids.append(message.request_id)
    except Exception:
        assert context.code() is not None
    return ids


@pytest.mark.parametrize("method", ["Generate", "Complete"])
@pytest.mark.parametrize(("own", "expected"), [("", SERVES_ID), ("mine", "mine")])
async def test_a_failing_call_is_named_as_its_messages_were(method: str, own: str, expected: str) -> None:
    service, context = FakeIngress(error=RuntimeError("secret"), fail_after=2), serves_context()
    ids = await run(service, method, ask(own), context)
    assert ids == ([expected] * 2 if method == "Generate" else [])
    assert [call.client_request_id for call in service.calls] == [expected]
    assert told(context) == (f"internal error, request {expected}", [expected], expected)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
@pytest.mark.parametrize(("own", "expected"), [("", SERVES_ID), ("mine", "mine")])
async def test_a_call_that_succeeds_is_named_too(method: str, own: str, expected: str) -> None:
    service, context = FakeIngress(), serves_context()
    assert set(await run(service, method, ask(own), context)) == {expected}
    assert told(context) == ("", [expected], "")


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_call_that_is_refused_at_the_door_is_named(method: str) -> None:
    service, context = FakeIngress(), serves_context()
    await run(service, method, ask("mine", sampling=pb.Sampling(top_k=-1)), context)
    assert service.calls == []
    assert told(context)[1:] == (["mine"], "mine")


async def test_an_id_that_no_trailer_can_hold_is_in_the_status() -> None:
    service, context = FakeIngress(error=RuntimeError("secret")), serves_context()
    await run(service, "Complete", ask(ODD_ID), context)
    assert told(context)[1:] == ([SERVES_ID], ODD_ID)


@pytest.mark.parametrize("own", ["", "mine", ODD_ID])
async def test_without_serve_a_call_is_named_all_the_same(own: str) -> None:
    with serving(FakeIngress(error=RuntimeError("secret"), fail_after=1)) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = OrcaServiceStub(channel).Generate(pb.GenerateRequest(prompt="Hi", request_id=own))  # type: ignore[no-untyped-call]
            message = await call.read()
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            trailers = dict(await call.trailing_metadata())
    assert message.request_id
    assert message.request_id in (own, trailers.get("request_id"))
    assert _named_in(trailers["grpc-status-details-bin"]) == message.request_id
    assert await call.details() == f"internal error, request {message.request_id}"


@pytest.mark.parametrize("method", ["Cancel", "Tokenize", "Detokenize", "GetModel", "GetStatus"])
async def test_every_other_call_is_named_by_serve(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    service, context = FakeIngress(), serves_context()
    for name in ("cancel", "tokenize", "detokenize", "model", "status"):
        monkeypatch.setattr(service, name, broken)
    request = pb.CancelRequest(request_id="of-another") if method == "Cancel" else getattr(pb, f"{method}Request")()
    await getattr(service, method)(request, context)
    assert told(context) == (f"internal error, request {SERVES_ID}", [SERVES_ID], SERVES_ID)
    assert f"request {SERVES_ID} failed" in caplog.text


def test_the_log_leads_from_the_clients_id_to_ours(caplog: pytest.LogCaptureFixture) -> None:
    """The engine knows only ours; its own lines have that one."""
    shown = as_orca_error(InternalError("9f3a.1"), "mine")
    assert str(shown) == "internal error, request mine"
    (line,) = caplog.messages
    assert "mine" in line
    assert "9f3a.1" in line
    as_orca_error(shown, "mine")
    assert len(caplog.messages) == 1, "said where it is found out, not again at the door"


def test_an_id_does_not_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    as_orca_error(RuntimeError("x"), ODD_ID)
    as_orca_error(InternalError("9f3a.1"), ODD_ID)
    assert all("\n2024" not in line for line in caplog.messages)
    assert sum("made up" in line for line in caplog.messages) == 2


async def test_a_stream_that_goes_on_elsewhere_is_logged_under_its_clients_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = Plane(replicas_of("a", "b"), Clock(), max_resumes=1)
    await plane.poll()
    client = plane.ask()
    await plane.step()
    for _ in range(2):
        next(far for far in plane.replicas.all.values() if far.engine.running).kill()
        await plane.step()
    await plane.run_out()
    assert isinstance(client.error, UnavailableError)
    said = [line for line in caplog.messages if "client-r1" in line]
    assert any("goes on" in line for line in said)
    assert any("given up" in line for line in said)
    assert all("(r1)" in line for line in said), "and ours, which is in the logs of the replicas"
    await plane.close()


# ---- HTTP


class Failing(FakeService):
    """What fails inside, and whose error has the id under which the replica knew the request."""

    async def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        async for served in super().generate(call):
            yield served
            raise InternalError("9f3a.1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"x-request-id": "mine"}, {"x-request-id": "not a fit one"}])
async def test_http_answers_are_named_in_header_and_body(
    stream: bool, given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    service = Failing()
    transport = httpx.ASGITransport(build_app(service))
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/v1/completions", json={"prompt": "Hi", "stream": stream}, headers=given)
    request_id = answer.headers["x-request-id"]
    assert request_id == given.get("x-request-id", request_id) or " " in given["x-request-id"]
    assert f"internal error, request {request_id}" in answer.text
    assert f'"id":"cmpl-{request_id}"' in answer.text or not stream
    assert service.calls[0].client_request_id == request_id
    assert any(request_id in line and "9f3a.1" in line for line in caplog.messages)
