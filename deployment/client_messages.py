"""The client's side of the wire: arguments to protobuf messages, protobuf messages to values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import DeployedReplicas, ReplicaStatus, ScalingStatus, ServiceStatus
from orca_core.errors import InvalidRequestError
from orca_core.types import (
    CancelOutcome,
    FinishReason,
    Load,
    ModelInfo,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)

Messages = Sequence[Mapping[str, str]]
"""Chat messages, each with ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class ClientChunk:
    """What is new of one generation, or the whole of it (``complete``). The last one has ``finish_reason``."""

    request_id: str
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[PositionLogprobs, ...] = field(default=(), repr=False)
    finish_reason: FinishReason | None = None
    stop: str | None = field(default=None, repr=False)
    usage: Usage | None = None
    timings: Timings | None = None
    replica: str = ""
    resumes: int = 0


def request_to_pb(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    request_id: str,
    model: str,
    session_id: str,
    sampling: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The message; what cannot be put in it is an ``InvalidRequestError``."""
    if sum(value is not None for value in (prompt, token_ids, messages)) != 1:
        raise InvalidRequestError("prompt", "give exactly one of prompt, token_ids and messages")
    request = _request_of_texts(request_id=request_id, model=model, session_id=session_id)
    try:
        if prompt is not None:
            request.prompt = prompt
        elif token_ids is not None:
            request.token_ids.ids.extend(token_ids)
            request.token_ids.SetInParent()
        else:
            request.messages.SetInParent()
            for message in messages or ():
                request.messages.messages.add(role=message["role"], content=message["content"])
    except (TypeError, ValueError, KeyError):
        raise InvalidRequestError("prompt", "is not of the documented form") from None
    for name, value in sampling.items():
        if value is None:
            continue
        if name not in pb.Sampling.DESCRIPTOR.fields_by_name:
            raise InvalidRequestError(name, "is not a sampling parameter")
        try:
            given: dict[str, Any] = {name: [value] if name == "stop" and isinstance(value, str) else value}
            request.sampling.MergeFrom(pb.Sampling(**given))
        except (TypeError, ValueError):
            raise InvalidRequestError(name, "has a value of the wrong kind or out of range") from None
    return request


def _request_of_texts(**texts: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    for name, text in texts.items():
        try:
            setattr(request, name, text)
        except (TypeError, ValueError):
            raise InvalidRequestError(name, "must be a string") from None
    return request


def chunk_from_pb(response: Any) -> ClientChunk:
    """A ``GenerateResponse`` or ``CompleteResponse``."""
    reasons = {pb.STOP: FinishReason.STOP, pb.LENGTH: FinishReason.LENGTH}
    usage, timings = response.usage, response.timings
    return ClientChunk(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(PositionLogprobs(_token(p.chosen), tuple(map(_token, p.top))) for p in response.logprobs),
        finish_reason=reasons.get(response.finish_reason),
        stop=response.stop if response.HasField("stop") else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)
        if response.HasField("usage")
        else None,
        timings=Timings(timings.queue_s, timings.first_token_s, timings.total_s)
        if response.HasField("timings")
        else None,
        replica=response.replica,
        resumes=response.resumes,
    )


def _token(token: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.text, token.raw)


def outcome_from_pb(response: pb.CancelResponse) -> CancelOutcome:
    """A ``CancelResponse``; an outcome this client does not know counts as not found."""
    outcomes = {
        pb.CancelResponse.CANCELLED: CancelOutcome.CANCELLED,
        pb.CancelResponse.ALREADY_FINISHED: CancelOutcome.ALREADY_FINISHED,
    }
    return outcomes.get(response.outcome, CancelOutcome.NOT_FOUND)


def model_from_pb(info: pb.GetModelResponse) -> ModelInfo:
    """A ``GetModelResponse``."""
    return ModelInfo(
        model_id=info.id,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        n_slots=info.n_slots,
        eos_ids=tuple(info.eos_ids),
        has_chat_template=info.has_chat_template,
    )


def status_from_pb(response: pb.GetStatusResponse) -> ServiceStatus:
    """A ``GetStatusResponse``."""
    return ServiceStatus(
        model=model_from_pb(response.model),
        replicas=tuple(ReplicaStatus(r.replica, _load(r.load), r.report_age_s, r.silent) for r in response.replicas),
        waiting_requests=response.waiting_requests,
        waiting_slots=response.waiting_slots,
        draining=response.draining,
        counters=dict(response.counters),
        ingresses_answered=response.ingresses_answered,
        ingresses_known=response.ingresses_known,
        scaling=_scaling(response.scaling) if response.HasField("scaling") else None,
        deployed=_deployed(response.deployed) if response.HasField("deployed") else None,
    )


def _load(load: pb.Load) -> Load:
    return Load(
        n_slots=load.n_slots,
        reserved_slots=load.reserved_slots,
        used_slots=load.used_slots,
        queued_slots=load.queued_slots,
        waiting=load.waiting,
        running=load.running,
        iterations=load.iterations,
        prompt_tokens=load.prompt_tokens,
        generated_tokens=load.generated_tokens,
        cached_prompt_tokens=load.cached_prompt_tokens,
        cached_slots=load.cached_slots,
    )


def _scaling(said: pb.ScalingDecision) -> ScalingStatus:
    return ScalingStatus(
        target=said.target,
        actual=said.actual,
        reason=said.reason,
        age_s=said.age_s,
        last_change=said.last_change,
        last_change_age_s=said.last_change_age_s,
    )


def _deployed(said: pb.DeployedReplicas) -> DeployedReplicas:
    return DeployedReplicas(said.running, said.starting, said.stopping, said.message)
