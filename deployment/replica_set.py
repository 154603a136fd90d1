"""The replicas as the ingress sees them, whichever they are at the moment; the only user of the deployment handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol, TypeVar

from deployment.replica import ReplicaReport
from orca_core.types import CancelOutcome, GenerationChunk, GenerationRequest

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

BROADCAST_TIMEOUT_S: Final = 2.0
"""A replica that does not answer a broadcast within that many seconds is left out."""


class ReplicaStream(Protocol):
    """One request on one replica: pairs of the replica's name and a chunk."""

    def __aiter__(self) -> AsyncIterator[tuple[str, GenerationChunk]]: ...

    def cancel(self) -> None:
        """End the request wherever it is: in the router, on its way, in the engine. Idempotent, never blocks."""


class ReplicaSet(Protocol):
    """Every replica of the service."""

    def stream(self, request: GenerationRequest, client_request_id: str) -> ReplicaStream:
        """Send a request to the replica with the most headroom."""
        ...

    def abandon(self, request_id: str) -> None:
        """Nobody reads that request (our id) any more: let all replicas know, without waiting for them."""

    async def reports(self) -> list[ReplicaReport]:
        """The reports of all replicas that answer in time; empty where there is none."""
        ...

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Cancel a client's requests on all replicas."""
        ...


class ServeReplicaSet:
    """The replicas behind a Ray Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._telling: set[asyncio.Task[list[CancelOutcome]]] = set()  # the event loop itself keeps no reference
        self._generate = handle.options(method_name="generate", stream=True)

    def stream(self, request: GenerationRequest, client_request_id: str) -> ReplicaStream:
        """See ``ReplicaSet.stream``."""
        stream: ReplicaStream = self._generate.remote(request, client_request_id)
        return stream

    def abandon(self, request_id: str) -> None:
        """See ``ReplicaSet.abandon``."""
        task = asyncio.create_task(self._broadcast("abandon", CancelOutcome, request_id))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def reports(self) -> list[ReplicaReport]:
        """See ``ReplicaSet.reports``."""
        return await self._broadcast("report", ReplicaReport)

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """See ``ReplicaSet.cancel``."""
        outcomes = await self._broadcast("cancel", CancelOutcome, client_request_id)
        for outcome in (CancelOutcome.CANCELLED, CancelOutcome.ALREADY_FINISHED):
            if outcome in outcomes:
                return outcome
        return CancelOutcome.NOT_FOUND

    async def _broadcast(self, method: str, kind: type[_T], *args: object) -> list[_T]:
        """Answers of ``kind`` from the replicas that give one in time; one that hangs holds up nobody's answer."""
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            asked = self._handle.broadcast(method, *args)
            # the public results_async gives all answers or none
            results = await asyncio.wait_for(asked._fetch_replica_results_async(), BROADCAST_TIMEOUT_S)  # noqa: SLF001
        except (DeploymentUnavailableError, TimeoutError) as error:
            _log.warning("no replica answered %s: %s", method, type(error).__name__)
            return []
        answers = await asyncio.gather(*(self._answer(method, result) for result in results))
        return [answer for answer in answers if isinstance(answer, kind)]

    @staticmethod
    async def _answer(method: str, result: Any) -> object:
        """What one replica says, or ``None``."""
        try:
            return await asyncio.wait_for(result.get_async(), BROADCAST_TIMEOUT_S)
        except Exception as error:  # whatever became of that replica, the others have answered
            _log.warning("a replica did not answer %s: %s", method, type(error).__name__)
            result.cancel()
            return None
