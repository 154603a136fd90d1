from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployment import grpc_api
from deployment.client_messages import status_from_pb
from deployment.grpc_api import Arrived, GrpcMethods, RpcFailedError, add_orca_service
from deployment.grpc_messages import call_from_pb, chunk_to_pb, status_to_pb
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import (
    DeployedReplicas,
    GenerationCall,
    ReplicaStatus,
    ScalingStatus,
    ServedChunk,
    ServiceStatus,
)
from orca_core.errors import InvalidRequestError, OverloadedError
from orca_core.types import (
    CancelOutcome,
    FinishReason,
    GenerationChunk,
    Load,
    ModelInfo,
    PositionLogprobs,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)

INFO = ModelInfo("m", "FakeForCausalLM", "float32", 1000, 64, 128, (2, 3), True)
CHUNKS = (
    GenerationChunk("r", "Hel", (5, 6)),
    GenerationChunk("r", "lo", (7,), (), FinishReason.STOP, "!", Usage(4, 3, 1), Timings(0.1, 0.2, 0.3)),
)


BUSY = Load(128, 80, 60, cached_prompt_tokens=11, cached_slots=12)


class Methods(GrpcMethods):
    """A service of fixed answers behind the real RPC methods."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_ready = True
        self.calls: list[GenerationCall] = []
        self.n_closed = 0

    async def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        self.calls.append(call)
        try:
            for chunk in CHUNKS:
                if self.error is not None:
                    raise self.error
                yield ServedChunk(chunk, "mine", "replica-1", 2)
        finally:
            self.n_closed += 1

    async def check(self, calls: list[GenerationCall]) -> None:
        raise NotImplementedError

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        return CancelOutcome(client_request_id)

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        return list(text.encode())

    async def detokenize(self, token_ids: tuple[int, ...], model: str = "") -> str:
        return bytes(token_ids).decode()

    async def model(self) -> ModelInfo:
        if self.error is not None:
            raise self.error
        return INFO

    async def status(self) -> ServiceStatus:
        load = Load(n_slots=128, reserved_slots=100, queued_slots=50)
        replicas = (ReplicaStatus("replica-1", load, 0.5), ReplicaStatus("replica-2", BUSY, 9.5, silent=True))
        scaling = ScalingStatus(2, 1, "1 -> 2 replicas: too much", 0.5, "1 -> 2 replicas: too much", 0.25)
        deployed = DeployedReplicas(2, 1, 3, "1 replica waits for room")
        return ServiceStatus(INFO, replicas, 3, 40, True, {"requests": 7}, 2, 3, scaling, deployed)

    async def ready(self) -> bool:
        return self.is_ready


class Context:
    """As much of Serve's gRPC context as is used."""

    def __init__(self, **metadata: str) -> None:
        self.metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: dict[str, Any] = {}

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self.metadata

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def trailing_metadata(self) -> list[tuple[str, Any]]:
        return list(self.trailers.items())

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        self.trailers = dict(trailing_metadata)

    @property
    def retry_delay_s(self) -> float:
        status = status_pb2.Status.FromString(self.trailers["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        (packed,) = [detail for detail in status.details if detail.Is(retry.DESCRIPTOR)]
        packed.Unpack(retry)
        return retry.retry_delay.ToNanoseconds() / 1e9


def here(message: pb.GenerateRequest) -> Arrived:
    return Arrived(message, os.getpid())


PROMPT = pb.GenerateRequest(prompt="hello")


async def test_a_stream_becomes_messages() -> None:
    first, last = [message async for message in Methods().Generate(here(PROMPT), Context())]
    assert (first.request_id, first.text, list(first.token_ids)) == ("mine", "Hel", [5, 6])
    assert first.finish_reason == pb.NOT_FINISHED
    assert not first.HasField("usage")
    assert first.replica == ""
    assert (last.finish_reason, last.stop, last.replica, last.resumes) == (pb.STOP, "!", "replica-1", 2)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_prompt_tokens) == (4, 3, 1)
    assert (last.timings.queue_s, last.timings.first_token_s, last.timings.total_s) == (0.1, 0.2, 0.3)


async def test_complete_is_the_whole_stream() -> None:
    whole = await Methods().Complete(here(PROMPT), Context())
    assert (whole.text, list(whole.token_ids), whole.finish_reason, whole.stop) == ("Hello", [5, 6, 7], pb.STOP, "!")
    assert (whole.replica, whole.resumes, whole.usage.completion_tokens) == ("replica-1", 2, 3)


async def test_logprobs_cross() -> None:
    position = PositionLogprobs(TokenLogprob(5, -0.5, "x", b"x"), (TokenLogprob(6, -1.5, "\ufffd", b"\xe2"),))
    message = chunk_to_pb(ServedChunk(GenerationChunk("r", "x", (5,), (position,)), "mine"))
    assert message.logprobs[0].chosen.logprob == -0.5
    assert message.logprobs[0].top[0].raw == b"\xe2"


async def test_a_reader_that_leaves_closes_the_generation() -> None:
    methods = Methods()
    stream = methods.Generate(here(PROMPT), Context())
    await anext(stream)
    await stream.aclose()
    assert methods.n_closed == 1


async def test_a_failed_stream_ends_with_its_status_where_the_server_is_here() -> None:
    methods, context = Methods(), Context()
    methods.error = OverloadedError("the waiting line is full", 2.5)
    assert [message async for message in methods.Generate(here(PROMPT), context)] == []
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "full" in context.details
    assert context.retry_delay_s == 2.5


async def test_a_failed_stream_raises_where_the_server_is_elsewhere() -> None:
    """Serve's proxy learns of a context only with a message or an exception."""
    methods, context = Methods(), Context()
    methods.error = OverloadedError("the waiting line is full", 2.5)
    with pytest.raises(RpcFailedError) as caught:
        await anext(methods.Generate(Arrived(PROMPT, os.getpid() + 1), context))
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(caught.value) == ""
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("method", ["Complete", "GetModel"])
async def test_a_failed_unary_call_has_its_status(method: str) -> None:
    methods, context = Methods(), Context()
    methods.error = OverloadedError("the waiting line is full", 2.5)
    await getattr(methods, method)(here(PROMPT) if method == "Complete" else pb.GetModelRequest(), context)
    assert (context.code, context.retry_delay_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5)


async def test_an_unknown_error_shows_nothing() -> None:
    methods, context = Methods(), Context()
    methods.error = ValueError("the secret prompt")
    await methods.Complete(here(pb.GenerateRequest(request_id="mine", prompt="x")), context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert context.details == "internal error, request mine"
    assert b"secret" not in context.trailers["grpc-status-details-bin"]


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


@pytest.mark.parametrize("outcome", list(CancelOutcome))
async def test_cancel_has_three_answers(outcome: CancelOutcome) -> None:
    response = await Methods().Cancel(pb.CancelRequest(request_id=outcome.value), Context())
    assert pb.CancelResponse.Outcome.Name(response.outcome) == outcome.name


async def test_cancel_of_nothing_is_refused() -> None:
    context = Context()
    await Methods().Cancel(pb.CancelRequest(), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_and_status() -> None:
    methods, context = Methods(), Context()
    model = await methods.GetModel(pb.GetModelRequest(), context)
    assert (model.id, model.vocab_size, model.max_model_len, list(model.eos_ids)) == ("m", 1000, 64, [2, 3])
    assert (model.has_chat_template, model.n_slots) == (True, 128)
    status = await methods.GetStatus(pb.GetStatusRequest(), context)
    assert (status.replicas[0].replica, status.replicas[0].report_age_s) == ("replica-1", 0.5)
    assert (status.replicas[0].load.n_slots, status.replicas[0].load.headroom) == (128, -22)
    assert (status.waiting_requests, status.waiting_slots, status.draining) == (3, 40, True)
    assert dict(status.counters) == {"requests": 7}
    assert [(each.silent, each.load.unused_slots) for each in status.replicas] == [(False, 100), (True, 20)]
    assert (status.replicas[1].load.cached_prompt_tokens, status.replicas[1].load.cached_slots) == (11, 12)
    assert (status.ingresses_answered, status.ingresses_known) == (2, 3)
    scaling = status.scaling
    assert status_from_pb(status).deployed == DeployedReplicas(2, 1, 3, "1 replica waits for room")
    assert (scaling.target, scaling.actual, scaling.age_s, scaling.last_change_age_s) == (2, 1, 0.5, 0.25)
    assert scaling.reason == scaling.last_change == "1 -> 2 replicas: too much"
    assert status_from_pb(status) == await methods.status(), "a client sees what was said"


def test_a_status_without_an_autoscaler_says_nothing_of_one() -> None:
    said = status_to_pb(ServiceStatus(INFO, ()))
    assert not said.HasField("deployed")
    assert not said.HasField("scaling")
    assert status_from_pb(said).scaling is None
    assert status_from_pb(pb.GetStatusResponse(model=said.model)).scaling is None, "a server of before"
    assert status_from_pb(pb.GetStatusResponse(model=said.model)).deployed is None


async def test_tokens() -> None:
    methods, context = Methods(), Context()
    tokens = await methods.Tokenize(pb.TokenizeRequest(text="ab"), context)
    assert (list(tokens.token_ids), tokens.count) == ([97, 98], 2)
    text = await methods.Detokenize(pb.DetokenizeRequest(token_ids=[97, 98]), context)
    assert (text.text, text.count) == ("ab", 2)
    assert context.code is None


async def test_health_follows_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: float) -> None:
        return None

    monkeypatch.setattr(grpc_api.asyncio, "sleep", at_once)
    methods, context = Methods(), Context()
    for service in ("", "orca.v1.OrcaService"):
        assert (await methods.Check(health_pb2.HealthCheckRequest(service=service), context)).status == 1
    watch = methods.Watch(health_pb2.HealthCheckRequest(), context)
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
    methods.is_ready = False
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await watch.aclose()
    assert (await methods.Check(health_pb2.HealthCheckRequest(), context)).status == 2


async def test_health_of_a_service_we_do_not_have() -> None:
    methods, context = Methods(), Context()
    await methods.Check(health_pb2.HealthCheckRequest(service="other"), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
    watch = methods.Watch(health_pb2.HealthCheckRequest(service="other"), context)
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    await watch.aclose()


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


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_the_log_names_each_call_by_its_clients_id(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """As it does over HTTP; Serve's own line knows an id of Serve's only."""
    caplog.set_level("INFO", "deployment.grpc_api")

    async def call(methods: Methods, request_id: str) -> None:
        said = getattr(methods, method)(here(pb.GenerateRequest(prompt="x", request_id=request_id)), Context())
        if method == "Complete":
            await said
        else:
            async for _ in said:
                pass

    methods = Methods()
    await call(methods, "one")
    methods.error = OverloadedError("full", 1.0)
    await call(methods, "two\nlines")
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{method} OK request=one", f"{method} RESOURCE_EXHAUSTED request='two\\nlines'"]


async def test_the_log_says_that_a_client_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "deployment.grpc_api")
    stream = Methods().Generate(here(pb.GenerateRequest(prompt="x", request_id="gone")), Context())
    await anext(stream)
    await stream.aclose()
    assert [record.getMessage() for record in caplog.records] == ["Generate CANCELLED request=gone"]
