"""A request on its way through the ingress, and where it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from deployment.errors import loggable
from deployment.feed import Feed
from orca_core.types import GenerationRequest


class Destination(Protocol):
    """What a request is sent over: see ``deployment.link.Link``."""

    replica: str
    link_id: str
    entries: dict[str, Entry]

    def drop(self, attempt_id: str) -> None:
        """Let the replica know that nobody wants a request any more."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An entry on its way to a replica, or being computed there. A new one has a new id, so that a late word of an
    earlier one can reach nobody. ``task``: the call that submits it; ``silent_s``: how long that has had no answer.
    """

    attempt_id: str
    link: Destination
    task: asyncio.Task[None] | None = None
    silent_s: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """A request on its way through the ingress. ``number``: its order of arrival, kept for life.

    ``request``: what is still to be generated. ``deadline``: on the ingress's clock. ``affinity``: requests of the same
    one may share a beginning; empty = none. ``handle``: by what ``Cancel`` finds it, where not by
    the client's id. ``place``: ``None`` while it waits in line, and after its end.
    ``is_promised``: a place in line is its own until a replica has accepted it. ``accepted_at``: when one first did.
    ``n_failures``: submissions that failed, or had no answer. ``blocked_since``: when it first was the head of the line
    and did not fit; ``n_overtakers``: how many went before it since.
    """

    request: GenerationRequest
    client_request_id: str
    deadline: float
    feed: Feed
    affinity: bytes = b""
    handle: str = ""
    number: int = 0
    n_attempts: int = 0
    place: Attempt | None = None
    is_promised: bool = False
    accepted_at: float | None = None
    n_failures: int = 0
    blocked_since: float | None = None
    n_overtakers: int = 0

    @property
    def name(self) -> str:
        """For the log: the id that the client knows, and ours where that is another, which replicas' logs have."""
        known, ours = loggable(self.client_request_id), self.request.request_id
        return ours if known == ours else f"{known} ({ours})"

    @property
    def demand(self) -> int:
        """Slots it needs on a replica."""
        return self.request.total_tokens
