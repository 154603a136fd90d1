"""The request router of the replicas: most headroom first, chosen and reserved in one step. Lives in every handle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployment.headroom import HeadroomBook
from deployment.metrics import RayRegistry, report_age
from orca_core.types import GenerationRequest, Load

TAKEN_AT: Final = "taken_at"
"""Key of the routing stats: when the load was taken, wall-clock seconds; the other keys are the fields of ``Load``."""


def load_to_stats(load: Load, taken_at: float) -> dict[str, float]:
    """A replica's load as Serve's routing stats: a flat dict of numbers."""
    stats: dict[str, float] = {name: getattr(load, name) for name in Load.__dataclass_fields__}
    stats[TAKEN_AT] = taken_at
    return stats


def load_from_stats(stats: Mapping[str, Any]) -> tuple[Load, float] | None:
    """The inverse of ``load_to_stats``; ``None`` where a replica has not reported yet."""
    taken_at = stats.get(TAKEN_AT)
    if taken_at is None:
        return None
    return Load(**{name: int(stats[name]) for name in Load.__dataclass_fields__ if name in stats}), float(taken_at)


def demand_of(pending_request: PendingRequest | None) -> int:
    """Slots the request will need: its prompt + ``max_new_tokens``; 0 for calls that generate nothing."""
    if pending_request is not None:
        for argument in pending_request.args:
            if isinstance(argument, GenerationRequest):
                return argument.total_tokens
    return 0


class HeadroomRouter(RequestRouter):
    """Sends each request to the replica with the most estimated headroom.

    Serve's default asks replicas for their queue lengths; here nothing is asked: the reports that replicas make
    anyway (``record_routing_stats``) and this handle's own books decide at once, without a pause in which another
    request could see the same numbers. Serve tells of every end of a request, so the books return to zero.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = HeadroomBook(time.time)
        self._record_age = report_age(RayRegistry())

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with ``request_router_kwargs``: those of ``HeadroomBook``."""
        self._book = HeadroomBook(time.time, **kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news: the replicas that are up, each with its latest report."""
        super().update_replicas(replicas)
        for replica in replicas:
            reported = load_from_stats(replica.routing_stats)
            if reported is not None:
                self._book.report(replica.replica_id.unique_id, *reported)
        self._book.keep(replica.replica_id.unique_id for replica in replicas)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Wait until there is a replica, then choose and reserve without giving up the event loop in between.

        ``is_retry``: the replica chosen before refused (it is draining) or died, which no report says yet: wait a
        little, then take any.
        """
        if is_retry:
            await self._backoff(0)
        while not self._replicas:
            self._replicas_updated_event.clear()
            await self._replicas_updated_event.wait()
        by_name = {replica.replica_id.unique_id: replica for replica in self._replicas.values()}
        request_id = pending_request.metadata.internal_request_id
        if is_retry and len(by_name) > 1:
            name = self._book.any_of(list(by_name))
            self._book.book(request_id, name, demand_of(pending_request))
        else:
            name = self._book.reserve(request_id, list(by_name), demand_of(pending_request))
        age_s = self._book.report_age_s(name)
        if age_s is not None:
            self._record_age(age_s)
        return by_name[name]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The ranking alone, one replica a rank: what Serve's base class asks for; our own choice does not use it."""
        by_name: dict[str, RunningReplica] = {r.replica_id.unique_id: r for r in candidate_replicas}
        ranked: Sequence[str] = self._book.rank(list(by_name), demand_of(pending_request))
        return [[by_name[name]] for name in ranked]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve's news: a request has ended, was cancelled, was refused or never left."""
        self._book.release(internal_request_id, replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve's news: a replica did not answer. It may be dead: it still is in the set, so choose it last."""
        super().on_replica_actor_unavailable(replica_id)
        self._book.suspect(replica_id.unique_id)
