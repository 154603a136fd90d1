"""What a gRPC request becomes: its fields, its deadline, and what is refused of it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployment import grpc_api
from deployment.grpc_api import Arrived, add_orca_service
from deployment.grpc_messages import call_from_pb
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import GenerationCall
from orca_core.errors import InvalidRequestError
from orca_core.types import SamplingParams
from tests.deployment.grpc_rig import PROMPT, Context, Methods, here


def test_fields_that_are_not_set_take_the_defaults() -> None:
    assert call_from_pb(PROMPT, None) == GenerationCall(SamplingParams(), prompt="hello")


def test_every_sampling_field_crosses() -> None:
    params = SamplingParams(
        max_new_tokens=9, min_new_tokens=1, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=2**64 - 1,
        stop=("a", "b"), stop_token_ids=(3,), ignore_eos=True, include_stop_text=True, repetition_penalty=1.1,
        presence_penalty=-1.0, frequency_penalty=1.0, logit_bias={5: -100.0}, logprobs=0,
    )  # fmt: skip
    fields = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    assert {field.name for field in pb.Sampling.DESCRIPTOR.fields} == set(fields)
    message = pb.GenerateRequest(
        request_id="mine", model="m", session_id="s", priority=3, token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.Sampling(**fields),
    )  # fmt: skip
    call = call_from_pb(pb.GenerateRequest.FromString(message.SerializeToString()), 4.0)
    assert call == GenerationCall(
        params, token_ids=(1, 2), model="m", client_request_id="mine", session_id="s", priority=3, timeout_s=4.0
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", -1.0), ("top_p", 0.0),
        ("top_p", float("nan")), ("max_new_tokens", 0), ("max_new_tokens", -1), ("repetition_penalty", 0.0),
        ("logprobs", 21), ("stop", [""]), ("stop_token_ids", [-1]), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
    ],
)  # fmt: skip
async def test_what_protobuf_lets_through_is_refused(field: str, value: Any) -> None:
    """Field cases C3, C5, C7: NaN is legal in protobuf."""
    methods, context = Methods(), Context()
    await methods.Complete(here(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(**{field: value}))), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in context.details
    assert not methods.calls


async def test_the_deadline_comes_as_metadata() -> None:
    methods = Methods()
    await methods.Complete(here(PROMPT), Context(orca_timeout_s="2.5"))
    assert methods.calls[0].timeout_s == 2.5


@pytest.mark.parametrize(
    ("remaining_s", "told", "expected"),
    [
        (None, {}, None),
        (3.0, {}, 3.0),
        (3.0, {"orca_timeout_s": "2.5"}, 2.5),
        (2.4, {"orca_timeout_s": "2.5"}, 2.5),
        (2.0, {"orca_timeout_s": "2.5"}, 2.0),
    ],
)
async def test_the_deadline_of_the_call_counts_too(
    remaining_s: float | None, told: dict[str, str], expected: float | None
) -> None:
    methods = Methods()
    arrived = Arrived(PROMPT, os.getpid(), remaining_s)
    assert [message.text async for message in methods.Generate(arrived, Context(**told))] == ["Hel", "lo"]
    await methods.Complete(arrived, Context(**told))
    assert [call.timeout_s for call in methods.calls] == [expected] * 2


async def test_serves_own_server_tells_how_long_a_call_has() -> None:
    """Serve puts behaviours of its own in place of ours, and their context does not tell."""
    seen: dict[str, Any] = {}

    def factory(service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def unary(message: Any, context: Any) -> bytes:
            seen[service_method.rpartition("/")[2]] = message
            return b""

        async def stream(message: Any, context: Any) -> AsyncGenerator[bytes, None]:
            seen[service_method.rpartition("/")[2]] = message
            yield b""

        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary

    server = gRPCGenericServer(factory)
    add_orca_service(Methods(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub

        stub = OrcaServiceStub(channel)
        assert len([message async for message in stub.Generate(PROMPT, timeout=600)]) == 1
        await stub.Complete(PROMPT)
        await stub.GetModel(pb.GetModelRequest(), timeout=600)
    await server.stop(None)
    assert 500 < seen["Generate"].remaining_s <= 606, "gRPC rounds up what it sends"
    assert seen["Complete"] == Arrived(PROMPT, os.getpid(), None)
    assert seen["GetModel"] == pb.GetModelRequest()


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "soon"])
async def test_a_deadline_that_is_none_is_refused(value: str) -> None:
    context = Context(orca_timeout_s=value)
    await Methods().Complete(here(PROMPT), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_registration_stamps_generate_alone() -> None:
    """Through a real server: the first message of ``Generate`` says which process read it."""
    seen: list[Any] = []

    class Servicer:
        def __getattr__(self, name: str) -> Any:
            async def unary(request: Any, context: Any) -> Any:
                seen.append(request)
                return pb.GetModelResponse()

            async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
                seen.append(request)
                yield pb.GenerateResponse(text="x")

            return stream if name == "Generate" else unary

    server = grpc.aio.server()
    add_orca_service(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub

        stub = OrcaServiceStub(channel)
        assert [message.text async for message in stub.Generate(PROMPT)] == ["x"]
        await stub.GetModel(pb.GetModelRequest())
    await server.stop(None)
    assert seen == [Arrived(PROMPT, os.getpid()), pb.GetModelRequest()]


def test_bad_requests_say_which_field() -> None:
    with pytest.raises(InvalidRequestError, match="top_k"):
        call_from_pb(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(top_k=-1)), None)


@pytest.mark.parametrize(
    "method", ["Generate", "Complete", "Cancel", "Tokenize", "Detokenize", "GetModel", "GetStatus"]
)
async def test_bytes_that_are_no_message(method: str) -> None:
    """Wire type 7 does not exist. gRPC's own answer would be UNKNOWN, with a word on our insides."""
    server = grpc.aio.server()
    add_orca_service(Methods(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            path = f"/{grpc_api.SERVICE_NAME}/{method}"
            call = channel.unary_stream(path) if method == "Generate" else channel.unary_unary(path)
            answer = call(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (anext(aiter(answer)) if method == "Generate" else answer)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "request: is not a message of orca.v1"
    finally:
        await server.stop(None)
