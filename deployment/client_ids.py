"""Which requests run under a client's own id. Several may share it, and it may be gone before it is asked for.

Ids like "1" are common, and whoever has another API key means something else by it. So between the parts of the service
an id goes by its *handle*: with a name for the key in front, if there is one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from deployment.quota import CALLER

N_REMEMBERED: Final = 4096
"""How many ended client ids can still be told from unknown ones."""


LONGEST: Final = 320
"""Characters of a handle, whatever a client sends: handles are remembered. No id that is accepted is as long."""


def handle_of(client_request_id: str) -> str:
    """What the current caller's id is called between the parts of the service: nobody else can name it."""
    caller = CALLER.get()
    handle = f"{caller}/{client_request_id}" if caller else client_request_id
    if len(handle) > LONGEST:
        return hashlib.blake2b(handle.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return handle


class ClientIds:
    """The handles of the requests of a replica or an ingress, live and ended. Lives on one event loop."""

    def __init__(self) -> None:
        self._live: dict[str, set[str]] = {}  # a client's id -> our ids
        self._client_of: dict[str, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self, client_request_id: str, request_id: str) -> None:
        """A request of that client's id has begun."""
        self._live.setdefault(client_request_id, set()).add(request_id)
        self._client_of[request_id] = client_request_id

    def end(self, request_id: str) -> None:
        """It has ended."""
        client_request_id = self._client_of.pop(request_id)
        live = self._live[client_request_id]
        live.discard(request_id)
        if not live:
            del self._live[client_request_id]
        self._ended[client_request_id] = None
        self._ended.move_to_end(client_request_id)
        while len(self._ended) > N_REMEMBERED:
            self._ended.popitem(last=False)

    def live(self, client_request_id: str) -> tuple[str, ...]:
        """Our ids of the requests that run under a client's id."""
        return tuple(self._live.get(client_request_id, ()))

    def is_known(self, client_request_id: str) -> bool:
        """Whether a request of that client's id runs, or has ended not long ago."""
        return client_request_id in self._live or client_request_id in self._ended
