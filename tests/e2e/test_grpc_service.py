"""The gRPC face through Ray Serve, HAProxy or Serve's own proxy, on two replicas of the embedded model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def ask(prompt: str = "Once upon a time", n: int = 8, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_new_tokens=n, ignore_eos=True)
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, **fields)


def read(server: Server, request: pb.GenerateRequest, timeout_s: float = 60.0) -> list[pb.GenerateResponse]:
    return list(server.stub.Generate(request, timeout=timeout_s))


def ends_with(server: Server, request: pb.GenerateRequest, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request, **{"timeout": 60.0, **options}))
    return caught.value


def finish(server: Server, method: str, request: pb.GenerateRequest) -> None:
    """Call and read to the end."""
    answer = getattr(server.stub, method)(request, timeout=30)
    if method == "Generate":
        list(answer)


def test_a_stream(settled: Server) -> None:
    messages = read(settled, ask(n=12, request_id="mine"))
    last = messages[-1]
    token_ids = list(itertools.chain.from_iterable(message.token_ids for message in messages))
    assert len(token_ids) == 12
    assert [message.finish_reason for message in messages[:-1]] == [pb.NOT_FINISHED] * (len(messages) - 1)
    assert last.finish_reason == pb.LENGTH
    assert {message.request_id for message in messages} == {"mine"}
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == settled.stub.Tokenize(pb.TokenizeRequest(text="Once upon a time")).count
    assert 0 < last.timings.first_token_s <= last.timings.total_s
    text = settled.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text
    assert "".join(message.text for message in messages) == text


def test_complete_is_the_stream_at_once(settled: Server) -> None:
    whole = settled.stub.Complete(ask(n=12), timeout=60)
    messages = read(settled, ask(n=12))
    assert whole.text == "".join(message.text for message in messages)
    assert list(whole.token_ids) == [token_id for message in messages for token_id in message.token_ids]
    assert whole.finish_reason == pb.LENGTH


def test_a_chat(settled: Server) -> None:
    messages = pb.Messages(messages=[pb.ChatMessage(role="user", content="Say hello.")])
    whole = settled.stub.Complete(
        pb.GenerateRequest(messages=messages, sampling=pb.Sampling(max_new_tokens=16)), timeout=60
    )
    assert whole.text.strip()


def test_two_streams_land_on_two_replicas(settled: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        streams = list(pool.map(lambda _: read(settled, ask(n=24)), range(2)))
    assert len({messages[-1].replica for messages in streams}) == 2


def test_a_burst_is_shared(settled: Server) -> None:
    """Field case E1."""
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: read(settled, ask(n=16)), range(8)))
    replicas = [messages[-1].replica for messages in streams]
    assert sorted(replicas.count(replica) for replica in set(replicas)) in ([4, 4], [3, 5])


def test_a_client_that_cancels_frees_its_slots(settled: Server) -> None:
    call = settled.stub.Generate(ask(n=900))
    next(call)
    assert sum(load.running for load in settled.loads()) == 1
    call.cancel()


def test_a_client_that_cancels_a_unary_call_frees_its_slots(settled: Server) -> None:
    future = settled.stub.Complete.future(ask(n=900))
    deadline = time.monotonic() + 20
    while not sum(load.running for load in settled.loads()):
        assert time.monotonic() < deadline
    future.cancel()


def test_many_clients_cancel_at_once(settled: Server) -> None:
    """Field cases A2 and A8: whatever the moment."""
    for _ in range(3):
        calls = [settled.stub.Generate(ask(n=900)) for _ in range(20)]
        for number, call in enumerate(calls):
            threading.Timer(0.02 * number, call.cancel).start()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        settled.settle()


def test_the_clients_deadline(settled: Server) -> None:
    """Nothing but gRPC's own tells the service of it."""

    def expired() -> int:
        return settled.stub.GetStatus(pb.GetStatusRequest(), timeout=10).counters["requests_deadline"]

    before, started = expired(), time.monotonic()
    error = ends_with(settled, ask(n=900), timeout=1.0)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 5.0
    settled.settle()
    assert expired() == before + 1


def test_the_deadline_as_data(settled: Server) -> None:
    error = ends_with(settled, ask(n=900), metadata=(("orca-timeout-s", "0.5"),))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.5 s" in (error.details() or "")


def test_cancel_by_id_has_three_answers(settled: Server) -> None:
    """Field case A12."""

    def cancel(request_id: str) -> str:
        outcome = settled.stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=10).outcome
        return str(pb.CancelResponse.Outcome.Name(outcome))

    call = settled.stub.Generate(ask(n=900, request_id="to-cancel"))
    next(call)
    assert cancel("never-seen") == "NOT_FOUND"
    assert cancel("to-cancel") == "CANCELLED"
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    settled.settle()
    assert cancel("to-cancel") == "ALREADY_FINISHED"


BAD = {
    "NaN temperature": (pb.GenerateRequest(prompt="x", sampling=pb.Sampling(temperature=float("nan"))), "temperature"),
    "infinite temperature": (
        pb.GenerateRequest(prompt="x", sampling=pb.Sampling(temperature=float("inf"))), "temperature"
    ),
    "empty prompt": (pb.GenerateRequest(prompt=""), "prompt"),
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    "no messages": (pb.GenerateRequest(messages=pb.Messages()), "messages"),
    "id out of vocabulary": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 10**9])), "token ids"),
    "negative id": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token ids"),
    "bias out of vocabulary": (
        pb.GenerateRequest(prompt="x", sampling=pb.Sampling(logit_bias={10**9: 1.0})), "logit_bias"
    ),
    "no tokens": (pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_new_tokens=0)), "max_new_tokens"),
    "too large": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 24), sampling=pb.Sampling(max_new_tokens=1001)),
        "24 tokens + max_new_tokens 1001 = 1025 is above max_model_len 1024",
    ),
}  # fmt: skip


def test_bad_input_is_refused_beside_an_undisturbed_stream(settled: Server) -> None:
    expected = [token_id for message in read(settled, ask(n=200)) for token_id in message.token_ids]
    beside: Iterator[pb.GenerateResponse] = settled.stub.Generate(ask(n=200), timeout=120)
    first = next(beside)
    for name, (request, words) in BAD.items():
        for method in ("Generate", "Complete"):
            with pytest.raises(grpc.RpcError) as caught:
                finish(settled, method, request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, method)
            assert words in caught.value.details(), (name, method)
    token_ids = [*first.token_ids, *(token_id for message in beside for token_id in message.token_ids)]
    assert token_ids == expected


def test_an_exact_fit_is_served(settled: Server) -> None:
    """Field case C14."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1] * 1020), sampling=pb.Sampling(max_new_tokens=4, ignore_eos=True)
    )
    assert settled.stub.Complete(request, timeout=120).usage.completion_tokens == 4


def test_an_unknown_model_is_not_found(settled: Server) -> None:
    assert ends_with(settled, ask(model="other")).code() is grpc.StatusCode.NOT_FOUND


def test_the_trailers_say_which_error(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Complete(ask(prompt=""), timeout=30)
    trailers = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == "INVALID_REQUEST"


def test_the_model_and_the_status(settled: Server) -> None:
    model = settled.stub.GetModel(pb.GetModelRequest())
    assert model.id == "smollm2-135m-instruct"
    assert (model.max_model_len, model.n_slots, model.has_chat_template) == (1024, 2048, True)
    status = settled.stub.GetStatus(pb.GetStatusRequest())
    assert len({replica.replica for replica in status.replicas}) == 2
    assert [replica.load.n_slots for replica in status.replicas] == [2048, 2048]
    counted = sum(n for name, n in status.counters.items() if name.startswith("requests_"))
    assert counted == status.counters["requests"]


def test_health(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)
    for service in ("", "orca.v1.OrcaService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_reflection(server: Server) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="orca.v1.OrcaService"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=10)
    names = {service.name for service in listed.list_services_response.service}
    assert {"orca.v1.OrcaService", "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto
