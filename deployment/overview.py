"""What ``status`` says: the replicas as this ingress sees them, line and totals of all ingresses. Free of Ray."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from deployment.dispatcher import Dispatcher
from deployment.links import Heard
from deployment.peers import IngressShare, Peers, Shares
from deployment.serving import DeployedReplicas, ReplicaStatus, ScalingStatus, ServiceStatus
from orca_core.types import ModelInfo

_T = TypeVar("_T")


class Around(NamedTuple):
    """What is there beside an ingress and its replicas. ``peers``: the ingresses; ``None`` = this is the only one.

    ``scaling``: asks for the last decision of the autoscaler; ``None`` = the number of replicas is fixed. ``deployed``:
    asks Serve for the replicas it has; ``None`` = there is no Serve.
    """

    peers: Peers | None = None
    scaling: Callable[[], Awaitable[ScalingStatus | None]] | None = None
    deployed: Callable[[], Awaitable[DeployedReplicas | None]] | None = None


class Others(NamedTuple):
    """What those around an ingress have said."""

    shares: Shares
    scaling: ScalingStatus | None
    deployed: DeployedReplicas | None


NOTHING_AROUND: Final = Around()


class Overview:
    """Puts the status together. ``n_ingresses``: as configured. ``wall_clock``: seconds, compared across processes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        counters: Mapping[str, int],
        around: Around,
        n_ingresses: int = 1,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._dispatcher = dispatcher
        self._counters = counters
        self._around = around
        self._n_ingresses = n_ingresses
        self._wall_clock = wall_clock

    def share(self, draining: bool) -> IngressShare:
        """What this ingress has of the service."""
        line = self._dispatcher.line_depth()
        return IngressShare(self._dispatcher.ingress_id, line.requests, line.slots, draining, dict(self._counters))

    async def ask(self) -> Others:
        """What others know, all asked at the same time."""
        peers, scaling, deployed = self._around
        shares, decision, counts = await asyncio.gather(
            peers.shares() if peers is not None else _nothing(Shares([], 0)),
            scaling() if scaling is not None else _nothing(None),
            deployed() if deployed is not None else _nothing(None),
        )
        return Others(shares, decision, counts)

    def status(self, model: ModelInfo, heard: Heard, others: Others, draining: bool) -> ServiceStatus:
        """The whole. The line and the counters are summed over the ingresses that answered, this one among them."""
        (said, n_known), scaling, deployed = others
        own = self.share(draining)
        shares = [own, *(share for share in said if share.ingress_id != own.ingress_id)]
        counters: Counter[str] = Counter()
        for share in shares:
            counters.update(share.counters)
        return ServiceStatus(
            model,
            self._replicas(heard),
            waiting_requests=sum(share.waiting_requests for share in shares),
            waiting_slots=sum(share.waiting_slots for share in shares),
            draining=any(share.draining for share in shares),
            counters=dict(counters),
            ingresses_answered=len(shares),
            ingresses_known=max(len(shares), n_known, self._n_ingresses),
            scaling=scaling,
            deployed=deployed,
        )

    def _replicas(self, heard: Heard) -> tuple[ReplicaStatus, ...]:
        """Those that have answered just now; of the others we are linked to, what they told last."""
        now = self._wall_clock()
        there = {
            report.replica: ReplicaStatus(report.replica, report.load, max(0.0, now - report.taken_at))
            for report in heard.reports
        }
        for replica, load, age_s in self._dispatcher.last_told():
            there.setdefault(replica, ReplicaStatus(replica, load, age_s, silent=True))
        return tuple(there[replica] for replica in sorted(there))


def unknown_model(model_id: str) -> ModelInfo:
    """The model of a service of which no replica has been seen: what clients call it, and zeros."""
    return ModelInfo(model_id, "", "", 0, 0, 0, (), has_chat_template=False)


async def _nothing(value: _T) -> _T:
    return value
