"""HAProxy reaches the ingresses of its own node where they listen.

Serve binds an ingress's HTTP port, and that of its own proxy, to ``http_options.host``, and has HAProxy look for those
of its node on loopback. With the address of one interface nobody listens there, and every request is a 503. (gRPC ports
are bound to all interfaces.)
"""

from __future__ import annotations

import re
from typing import Final

_FRONT: Final = re.compile(
    r"^frontend http_frontend\n(?:[ \t]+.*\n|\n)*?[ \t]+bind[ \t]+(\S+):\d+[ \t]*$", re.MULTILINE
)
_SERVER: Final = re.compile(r"^([ \t]+server[ \t]+\S+[ \t]+)(?:127\.0\.0\.1|::1|localhost)(:\d+\b)", re.MULTILINE)
_GRPC: Final = "frontend grpc_frontend\n"


def with_hosts(config: str) -> str:
    """A configuration that Serve has written, with HTTP servers of this node where they are; twice is as once."""
    front = _FRONT.search(config)
    if front is None or front[1] == "*":
        return config
    http, grpc, rest = config.partition(_GRPC)
    return _SERVER.sub(lambda found: f"{found[1]}{front[1]}{found[2]}", http) + grpc + rest
