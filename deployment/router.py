"""The request router of the replicas: a call goes where its caller says. Lives in every handle.

The choice itself is made in the ingress (``dispatcher``), which knows the line and every link; Serve's part is to know
which replicas there are and to carry the call.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, Final

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployment.parcels import Pinned
from orca_core.errors import UnavailableError

N_DEPARTED: Final = 64
"""Replicas that have left the set and can still be told to forget a request: they may be draining."""


class PinnedRouter(RequestRouter):
    """A call with ``Pinned`` among its arguments goes to that replica or fails at once; any other to any replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._departed: OrderedDict[str, RunningReplica] = OrderedDict()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news: the replicas that are up."""
        staying = {replica.replica_id for replica in replicas}
        for replica_id, replica in self.curr_replicas.items():
            if replica_id not in staying:
                self._departed[replica_id.unique_id] = replica
        while len(self._departed) > N_DEPARTED:
            self._departed.popitem(last=False)
        super().update_replicas(replicas)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Raises ``UnavailableError`` where the replica that was named is not in the set, or has just refused.

        ``is_retry``: the replica chosen before refused (it is about to exit) or died, which Serve may not know yet.
        """
        pinned = next((each for each in pending_request.args if isinstance(each, Pinned)), None)
        if pinned is not None:
            return self._named(pinned, is_retry)
        if is_retry:
            await self._backoff(0)
        while not self.curr_replicas:
            self._replicas_updated_event.clear()
            await self._replicas_updated_event.wait()
        return random.choice(list(self.curr_replicas.values()))

    def _named(self, pinned: Pinned, is_retry: bool) -> RunningReplica:
        found = next(
            (each for each in self.curr_replicas.values() if each.replica_id.unique_id == pinned.replica), None
        )
        if found is None and pinned.may_have_left:
            found = self._departed.get(pinned.replica)
        if found is None or is_retry:
            raise UnavailableError("the replica has left")
        return found

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """What Serve's base class asks for; our own choice does not use it."""
        return [candidate_replicas]
