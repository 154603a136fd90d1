"""An HAProxy that was replaced sends what still reaches it to its successor, and none loses a request on the way.

Serve starts a new HAProxy whenever an ingress comes or goes. The old one keeps the connections of its clients, and the
list of ingresses it once read, none of which it checks any more. A client's next request over such a connection would
go to ingresses that are gone: it waits for one after the other to refuse, or finds its connection closed without a
word, since to HAProxy a connection that was kept and then breaks is the client's to repeat. So where HAProxy is
stopping, requests go to whoever listens on the front's own port now. What had begun before ends where it is.

An ingress that exits closes connections that HAProxy keeps for the next request. Such a request can be sent again, but
only if HAProxy has all of it, so it waits for the body of one that fits its buffer (16 KiB); larger ones go on at once.
And each further try may meet another connection of the same ingress, so there are more of them than HAProxy's three.
"""

from __future__ import annotations

import re
from typing import Final

_SECTION: Final = re.compile(r"^(?=(?:global|defaults|frontend|backend|listen)\b)", re.MULTILINE)
_BIND: Final = re.compile(r"^\s*bind\s+(\S+):(\d+)(?:\s+(proto h2))?\s*$", re.MULTILINE)
_FIRST_RULE: Final = re.compile(r"^ *http-request ", re.MULTILINE)
_FIRST_CHOICE: Final = re.compile(r"^ *(?:use_backend|default_backend) ", re.MULTILINE)
_SUCCESSORS: Final = {"frontend http_frontend": "orca_successor", "frontend grpc_frontend": "orca_grpc_successor"}
_FOUND: Final = r"\g<0>"
_TRIES: Final = 8
BODY_WITHIN_S = 10
"""Seconds; a client whose body takes longer is answered with 408."""
_BUFFERED: Final = "{ req.hdr_cnt(content-length) eq 1 } { req.hdr_val(content-length) le 12000 }"


def with_successor(config: str) -> str:
    """A configuration that Serve has written, changed so; a second time changes nothing."""
    if any(f"backend {name}\n" in config for name in _SUCCESSORS.values()):
        return config
    is_grpc, out = False, []
    for section in _SECTION.split(config):
        title, _, rest = section.partition("\n")
        name = _SUCCESSORS.get(title.strip())
        bind = _BIND.search(rest) if name else None
        is_grpc = is_grpc or title.strip() == "frontend grpc_frontend"
        if name and bind:
            rest = _FIRST_RULE.sub(f"    http-request set-log-level silent if {{ stopping }}\n{_FOUND}", rest, 1)
            rest = _FIRST_CHOICE.sub(f"    use_backend {name} if {{ stopping }}\n{_FOUND}", rest, 1)
        elif not is_grpc and title.startswith("backend ") and title.strip() != "backend default_backend":
            wait = f"http-request wait-for-body time {BODY_WITHIN_S}s if {_BUFFERED}"
            rest = f"    retries {_TRIES}\n    {wait}\n{rest}"
        out.append(f"{title}\n{rest}" if "\n" in section else section)
        if name and bind:
            out.append(_successor(name, bind))
    return "".join(out)


def _successor(name: str, bind: re.Match[str]) -> str:
    """A backend of one server: this front's port, whoever listens there."""
    host, port, protocol = bind.groups()
    address = "127.0.0.1" if host == "*" else host
    return (
        f"backend {name}\n    mode http\n    http-reuse never\n    retries 3\n"
        f"    server next {address}:{port}{' ' + protocol if protocol else ''}\n"
    )
