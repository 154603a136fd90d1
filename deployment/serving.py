"""The service both faces (gRPC and HTTP) translate to: plain values and one protocol, free of Ray, HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from orca_core.types import CancelOutcome, GenerationChunk, Load, ModelInfo, SamplingParams

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
"""Roles of a chat message, the same for every face -> what the chat template is told. Templates write a role as it is:
any other text could spell a control token."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat prompt."""

    role: str
    content: str

    def __repr__(self) -> str:  # a repr ends up in logs: it must not hold the prompt
        return f"ChatMessage({self.role!r}, {len(self.content)} characters)"


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """One generation as a client asked for it. Exactly one of ``prompt``, ``token_ids``, ``messages`` is set.

    ``client_request_id``: the client's own id: echoed and usable in ``cancel``, never a key. ``timeout_s``: seconds
    that are left of the client's deadline when the call arrives; ``None`` = none. ``api``: grpc or http, for the books.
    """

    sampling: SamplingParams
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    model: str = ""
    client_request_id: str = ""
    session_id: str = ""
    priority: int = 0
    timeout_s: float | None = None
    api: str = field(default="other", compare=False)

    def __repr__(self) -> str:
        return f"GenerationCall({self.client_request_id!r}, model={self.model!r})"


class ServedChunk(NamedTuple):
    """A chunk of a stream, with where it came from. ``request_id``: the client's id, or ours where it gave none.

    ``resumes``: how often the stream had lost its replica by then.
    """

    chunk: GenerationChunk
    request_id: str
    replica: str = ""
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as the ingress sees it. ``report_age_s``: seconds since its ``load`` was reported."""

    replica: str
    load: Load
    report_age_s: float


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The whole service. ``waiting_*``: the line at the ingress. ``counters``: totals since start by name."""

    model: ModelInfo
    replicas: tuple[ReplicaStatus, ...]
    waiting_requests: int = 0
    waiting_slots: int = 0
    draining: bool = False
    counters: dict[str, int] = field(default_factory=dict)


class Service(Protocol):
    """What a face needs. Every method raises ``OrcaError`` and nothing else on purpose."""

    def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        """Stream one generation. Closing the generator, or cancelling the task that reads it, cancels the request."""
        ...

    async def check(self, calls: list[GenerationCall]) -> None:
        """Validate calls without starting any, so that a list of prompts starts as a whole or not at all."""

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Cancel every live request of that client id, wherever it runs."""
        ...

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text, as a prompt would be encoded. ``model``: what the client calls it, empty = the one."""
        ...

    async def detokenize(self, token_ids: tuple[int, ...], model: str = "") -> str:
        """Text of token ids."""
        ...

    async def model(self) -> ModelInfo:
        """The served model."""
        ...

    async def status(self) -> ServiceStatus:
        """Replicas with their load, the waiting line, totals."""
        ...

    async def ready(self) -> bool:
        """Whether at least one replica takes requests and the service is not draining."""
        ...
