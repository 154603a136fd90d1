"""The gRPC face over a service of fixed answers: what it says, how it fails, health and the log."""

from __future__ import annotations

import os

import grpc
import pytest
from grpc_health.v1 import health_pb2

from deployment import grpc_api
from deployment.client_messages import status_from_pb
from deployment.grpc_api import Arrived, RpcFailedError
from deployment.grpc_messages import chunk_to_pb, status_to_pb
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import DeployedReplicas, ServedChunk, ServiceStatus
from orca_core.errors import OverloadedError
from orca_core.types import CancelOutcome, GenerationChunk, PositionLogprobs, TokenLogprob
from tests.deployment.grpc_rig import INFO, PROMPT, Context, Methods, here


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
