"""Protobuf messages to serving values and back. Nothing here can wait, fail for a reason of ours, or know Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import ChatMessage, GenerationCall, ServedChunk, ServiceStatus
from orca_core.types import (
    CancelOutcome,
    FinishReason,
    GenerationChunk,
    Load,
    ModelInfo,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
    merge_chunks,
)

_PLAIN_SAMPLING: Final = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "include_stop_text",
)  # fmt: skip
_FINISH_REASONS: Final = {None: pb.NOT_FINISHED, FinishReason.STOP: pb.STOP, FinishReason.LENGTH: pb.LENGTH}

OUTCOMES: Final = {
    CancelOutcome.CANCELLED: pb.CancelResponse.CANCELLED,
    CancelOutcome.ALREADY_FINISHED: pb.CancelResponse.ALREADY_FINISHED,
    CancelOutcome.NOT_FOUND: pb.CancelResponse.NOT_FOUND,
}


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Fields that are not set take the defaults of ``SamplingParams``, which raises ``InvalidRequestError``."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_SAMPLING if message.HasField(name)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        **given,
    )


def call_from_pb(message: pb.GenerateRequest, timeout_s: float | None, request_id: str = "") -> GenerationCall:
    """``timeout_s``: seconds that are left of the client's deadline. ``request_id``: where the message names none.

    Raises ``InvalidRequestError``.
    """
    given = message.WhichOneof("input")
    chat = tuple(ChatMessage(m.role, m.content) for m in message.messages.messages)
    return GenerationCall(
        sampling=sampling_from_pb(message.sampling),
        prompt=message.prompt if given == "prompt" else None,
        token_ids=tuple(message.token_ids.ids) if given == "token_ids" else None,
        messages=chat if given == "messages" else None,
        model=message.model,
        client_request_id=message.request_id or request_id,
        session_id=message.session_id,
        priority=message.priority,
        timeout_s=timeout_s,
        api="grpc",
    )


def chunk_to_pb(served: ServedChunk) -> pb.GenerateResponse:
    """One message of a stream."""
    chunk = served.chunk
    if chunk.finish_reason is None and not chunk.logprobs:  # almost all are no more than that
        return pb.GenerateResponse(request_id=served.request_id, text=chunk.text, token_ids=chunk.token_ids)
    return pb.GenerateResponse(**_fields(served))


def result_to_pb(stream: Sequence[ServedChunk]) -> pb.CompleteResponse:
    """All chunks of a generation, the last one included, as the answer of a unary call."""
    last = stream[-1]
    whole = merge_chunks([served.chunk for served in stream])
    return pb.CompleteResponse(**_fields(ServedChunk(whole, last.request_id, last.replica, last.resumes)))


def _fields(served: ServedChunk) -> dict[str, Any]:
    """The fields that ``GenerateResponse`` and ``CompleteResponse`` share."""
    chunk = served.chunk
    fields: dict[str, Any] = {"request_id": served.request_id, "text": chunk.text, "token_ids": chunk.token_ids}
    if chunk.logprobs:
        fields["logprobs"] = [_logprobs_to_pb(position) for position in chunk.logprobs]
    if chunk.finish_reason is not None:
        fields |= _last_fields(chunk) | {"replica": served.replica, "resumes": served.resumes}
    return fields


def _last_fields(chunk: GenerationChunk) -> dict[str, Any]:
    fields: dict[str, Any] = {"finish_reason": _FINISH_REASONS[chunk.finish_reason], "stop": chunk.stop}
    if chunk.usage is not None:
        usage = chunk.usage
        fields["usage"] = pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
        )
    if chunk.timings is not None:
        timings = chunk.timings
        fields["timings"] = pb.Timings(queue_s=timings.queue_s, first_token_s=timings.ttft_s, total_s=timings.total_s)
    return fields


def _logprobs_to_pb(position: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=_logprob_to_pb(position.chosen), top=[_logprob_to_pb(alternative) for alternative in position.top]
    )


def _logprob_to_pb(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, text=logprob.text, raw=logprob.bytes)


def model_to_pb(info: ModelInfo) -> pb.GetModelResponse:
    """The served model."""
    return pb.GetModelResponse(
        id=info.model_id,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_ids=info.eos_ids,
        has_chat_template=info.has_chat_template,
        n_slots=info.n_slots,
    )


def status_to_pb(status: ServiceStatus) -> pb.GetStatusResponse:
    """The whole service."""
    replicas = [
        pb.ReplicaStatus(replica=r.replica, load=_load_to_pb(r.load), report_age_s=r.report_age_s, silent=r.silent)
        for r in status.replicas
    ]
    return pb.GetStatusResponse(
        model=model_to_pb(status.model),
        replicas=replicas,
        waiting_requests=status.waiting_requests,
        waiting_slots=status.waiting_slots,
        draining=status.draining,
        counters=status.counters,
        ingresses_answered=status.ingresses_answered,
        ingresses_known=status.ingresses_known,
        scaling=None if status.scaling is None else pb.ScalingDecision(**asdict(status.scaling)),
        deployed=None if status.deployed is None else pb.DeployedReplicas(**asdict(status.deployed)),
    )


def _load_to_pb(load: Load) -> pb.Load:
    names = Load.__dataclass_fields__.keys() & pb.Load.DESCRIPTOR.fields_by_name.keys()
    derived = {"headroom": load.headroom, "unused_slots": load.unused_slots}
    return pb.Load(**derived, **{name: getattr(load, name) for name in names})
