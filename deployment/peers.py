"""The ingresses of a service among each other: what each has of it, and how the others are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from deployment.broadcast import ask_each, best_outcome
from orca_core.types import CancelOutcome

SHARE_TIMEOUT_S: Final = 1.0
"""An ingress that does not say its share within that many seconds is left out, and counted as such."""


@dataclass(frozen=True, slots=True)
class IngressShare:
    """What one ingress has of the service: its line, and its totals since it started. ``ingress_id``: whose it is."""

    ingress_id: str
    waiting_requests: int = 0
    waiting_slots: int = 0
    draining: bool = False
    counters: Mapping[str, int] = field(default_factory=dict)


class Shares(NamedTuple):
    """``said``: of those that answered in time; ``n_known``: how many ingresses were asked, 0 where nobody was."""

    said: list[IngressShare]
    n_known: int


class Peers(Protocol):
    """All ingresses of the service; the one that asks may be among them."""

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """Have each cancel what it has of a client's id."""
        ...

    async def shares(self) -> Shares:
        """What each has. Returns soon, whoever hangs."""
        ...


class ServePeers:
    """The ingresses as Serve knows them, found out on first use: Serve knows of us only once we are constructed."""

    def __init__(self) -> None:
        self._found: Any = None

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        """See ``Peers.cancel``."""
        return best_outcome((await ask_each(self._handle(), "cancel_here", CancelOutcome, client_request_id)).said)

    async def shares(self) -> Shares:
        """See ``Peers.shares``."""
        answers = await ask_each(self._handle(), "share", IngressShare, timeout_s=SHARE_TIMEOUT_S)
        return Shares(answers.said, answers.n_asked)

    def _handle(self) -> Any:
        from ray import serve

        if self._found is None:
            context = serve.get_replica_context()
            self._found = serve.get_deployment_handle(context.deployment, context.app_name)
        return self._found
