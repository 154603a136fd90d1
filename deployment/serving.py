"""The service both faces (gRPC and HTTP) translate to: plain values and one protocol, free of Ray, HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from orca_core.types import CancelOutcome, GenerationChunk, Load, ModelInfo, SamplingParams


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
    """One replica as the ingress sees it. ``report_age_s``: seconds since its ``load`` was reported.

    ``silent``: it has not answered now: busy, hanging, or about to leave; ``load`` is what it told last.
    """

    replica: str
    load: Load
    report_age_s: float
    silent: bool = False


@dataclass(frozen=True, slots=True)
class ScalingStatus:
    """The autoscaler's last decision: ``target`` replicas, when ``actual`` were running, and why in one line.

    ``age_s``: seconds since. ``last_change``: why the number last changed, ``last_change_age_s`` seconds ago; empty =
    it has not since the application was deployed.
    """

    target: int
    actual: int
    reason: str
    age_s: float
    last_change: str = ""
    last_change_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeployedReplicas:
    """Replicas as Serve counts them. ``starting``: they wait for room or load the model; ``stopping``: they take
    nothing new and end with their last stream. ``message``: what Serve says of them while not all is well, one line.
    """

    running: int
    starting: int
    stopping: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The whole service. ``waiting_*``: the lines of the ingresses that answered, summed; ``counters``: the totals of
    these by name, each since it started. ``ingresses_known``: how many there should be, those that did not answer in
    time included. ``draining``: whether one of them does. ``scaling``: ``None`` = the number of replicas is fixed, or
    nothing is known. ``deployed``: ``None`` = Serve did not answer in time. ``model``: its id alone, and zeros, while
    the ingress that was asked has not seen a replica.
    """

    model: ModelInfo
    replicas: tuple[ReplicaStatus, ...]
    waiting_requests: int = 0
    waiting_slots: int = 0
    draining: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    ingresses_answered: int = 1
    ingresses_known: int = 1
    scaling: ScalingStatus | None = None
    deployed: DeployedReplicas | None = None


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
        """Replicas with their load, the waiting lines and totals of all ingresses, the last scaling decision."""
        ...

    async def ready(self) -> bool:
        """Whether at least one replica takes requests and the service is not draining."""
        ...
