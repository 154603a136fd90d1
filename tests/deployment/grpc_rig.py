"""A service of fixed answers behind the real RPC methods, and as much of a call as they look at."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from deployment.grpc_api import Arrived, GrpcMethods
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.serving import (
    DeployedReplicas,
    GenerationCall,
    ReplicaStatus,
    ScalingStatus,
    ServedChunk,
    ServiceStatus,
)
from orca_core.types import CancelOutcome, FinishReason, GenerationChunk, Load, ModelInfo, Timings, Usage

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
