"""What HAProxy answers by itself, in words that our clients understand.

Serve's configuration answers for an ingress that is not there: 500 in plain text where none answers, 404 in plain text
and gRPC's NOT_FOUND where it knows of no application. It knows of none for a while after each start, and clients take
both for permanent; so does Serve's own proxy, to which requests come while an application ends. Ours say 503 with an
OpenAI error object, and UNAVAILABLE; both with the time after which to come back. Where an application is known, a path
outside of it stays a 404, as an OpenAI error object.

While a node drains, Serve's HAProxy fails Serve's own health path alone. Our probes (``/readyz``, gRPC health) would go
through to ingresses on other nodes, which are ready, and a balancer would send to this node until it is gone. Ours fail
as well then; requests are served to the end.

An ``x-request-id`` that is not 1 to 128 visible ASCII characters goes no further: Serve fails at one that is not UTF-8,
and writes others into its log as they are.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from deployment.errors import http_error
from deployment.grpc_errors import grpc_status
from orca_core.errors import UnavailableError

_SECTION: Final = re.compile(r"^(?=(?:global|defaults|frontend|backend|listen)\b)", re.MULTILINE)
_ERROR_FILE: Final = re.compile(r"^\s*errorfile\s+\d{3}\s+(\S+)\s*$", re.MULTILINE)
_RETURN: Final = re.compile(r"^ *http-request return .*\n?", re.MULTILINE)
_USES: Final = re.compile(r"^\s*use_backend\s+(?!grpc_fallback_backend\b|orca_)", re.MULTILINE)  # an application's
_HTTP_FRONT: Final = "frontend http_frontend"
_GRPC_FRONT: Final = "frontend grpc_frontend"
_HEALTH_RULE: Final = re.compile(r"^ *http-request return (.*) if (?:healthcheck|is_healthz)\b.*\n", re.MULTILINE)
_HEALTHY: Final = re.compile(r"status 200 content-type text/plain|grpc-status 0\b")
"""In the answers of Serve's health paths, under whatever condition."""

_NO_ODD_IDS: Final = (
    "    http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg '^[!-~]{1,128}$' }\n"
)
_FIRST_RULE: Final = re.compile(r"^ *http-request ", re.MULTILINE)

_GONE: Final = "{ status 404 } { res.hdr(content-type) -m beg text/plain }"
"""Of Serve's own proxy, to which requests come when the last ingress has gone. Ours never say it in plain text. (What
it says in gRPC stands in the trailers, which HAProxy cannot read: our client knows it.)"""

_PROBES: Final = {_HTTP_FRONT: "path_end /readyz", _GRPC_FRONT: "path_beg /grpc.health.v1.Health/"}
_STATUSES: Final = (502, 503, 504)
"""What HAProxy answers with when no server of a backend does."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Files with whole HTTP responses, in the folder of a configuration."""

    folder: Path

    @property
    def unavailable(self) -> Path:
        """To HTTP clients, when no ingress answers."""
        return self.folder / "unavailable.http"

    @property
    def unavailable_grpc(self) -> Path:
        """The same to gRPC clients."""
        return self.folder / "unavailable-grpc.http"

    @property
    def unknown_path(self) -> Path:
        """To HTTP clients, when a path belongs to no application."""
        return self.folder / "unknown-path.http"

    @property
    def slow_body(self) -> Path:
        """To HTTP clients whose body does not come."""
        return self.folder / "slow-body.http"

    def write(self) -> None:
        """Write all of them."""
        self.unavailable.write_bytes(unavailable_page())
        self.unavailable_grpc.write_bytes(unavailable_grpc_page())
        body = {"message": "unknown path", "type": "invalid_request_error", "param": None, "code": None}  # as the app's
        self.unknown_path.write_bytes(_page("404 Not Found", {"error": body}))
        body = {**body, "message": "the body of the request did not come in time"}
        self.slow_body.write_bytes(_page("408 Request Timeout", {"error": body}))


def answer_for_ingresses(config: Path) -> None:
    """Put our answers into a configuration that Serve has written; a second time changes nothing."""
    text, pages = config.read_text(), Pages(config.parent)
    pages.write()
    for page in set(_ERROR_FILE.findall(text)) - {str(pages.unavailable_grpc)}:
        Path(page).write_bytes(unavailable_page())
    config.write_text(with_answers(text, pages))


def with_answers(config: str, pages: Pages) -> str:
    """Serve's configuration with our answers in the places of its own."""
    sections = _SECTION.split(config)
    fronts = {section.split("\n", 1)[0].strip(): section for section in sections if section.startswith("frontend ")}
    has_http = bool(_USES.search(fronts.get(_HTTP_FRONT, "")))
    has_grpc = bool(_USES.search(fronts.get(_GRPC_FRONT, "")))
    is_grpc, out = False, []
    for section in sections:
        title, _, rest = section.partition("\n")
        is_grpc = (is_grpc or title.strip() == _GRPC_FRONT) and not title.startswith("listen ")
        if title.strip() in _PROBES:
            page = pages.unavailable_grpc if is_grpc else pages.unavailable
            rest = _probes_follow(rest, f"{page} if {{ {_PROBES[title.strip()]} }}")
            if not is_grpc and _NO_ODD_IDS not in rest:
                rest = _FIRST_RULE.sub(lambda found: _NO_ODD_IDS + found[0], rest, count=1)
        elif title.strip() == "backend default_backend":
            rest = _refusing(rest, 404 if has_http else 503, pages.unknown_path if has_http else pages.unavailable)
        elif title.strip() == "backend default_grpc_backend" and not has_grpc:
            rest = _refusing(rest, 503, pages.unavailable_grpc)
        elif not is_grpc and title.startswith("backend ") and str(pages.slow_body) not in rest:
            gone = f"http-response return status 503 errorfile {pages.unavailable} if {_GONE}"
            rest = f"    errorfile 408 {pages.slow_body}\n    {gone}\n{rest}"
        if is_grpc and title.startswith("backend ") and str(pages.unavailable_grpc) not in rest:
            rest = "".join(f"    errorfile {status} {pages.unavailable_grpc}\n" for status in _STATUSES) + rest
        out.append(f"{title}\n{rest}" if "\n" in section else section)
    return "".join(out)


def unavailable_page() -> bytes:
    """A whole HTTP response: 503, Retry-After, and an OpenAI error object."""
    answer = http_error(_unavailable(), "")
    return _page("503 Service Unavailable", answer.body, answer.headers)


def unavailable_grpc_page() -> bytes:
    """A whole gRPC response without a message ("trailers only"): UNAVAILABLE, with ErrorInfo and RetryInfo."""
    code, details, trailers = grpc_status(_unavailable(), "")
    extra = "".join(f"{key}: {base64.b64encode(value).decode().rstrip('=')}\r\n" for key, value in trailers)
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\n"
        f"grpc-status: {code.value[0]}\r\ngrpc-message: {details}\r\n{extra}Content-Length: 0\r\n\r\n"
    )
    return head.encode()


def _unavailable() -> UnavailableError:
    return UnavailableError("no ingress of the service answers")


def _page(status: str, content: Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    body = json.dumps(content).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nCache-Control: no-cache\r\n"
    return f"{head}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _probes_follow(section: str, page: str) -> str:
    """A front whose probes fail where Serve's own health path does so in any case: the node is to be left."""
    rules = list(_HEALTH_RULE.finditer(section))
    ours = f"    http-request return status 503 errorfile {page}\n"
    if not rules or ours in section or any(_HEALTHY.search(rule[1]) for rule in rules):
        return section
    end = rules[-1].end()
    return section[:end] + ours + section[end:]


def _refusing(section: str, status: int, page: Path) -> str:
    """A section whose only answer is this page."""
    return _RETURN.sub("", section).rstrip("\n") + f"\n    http-request return status {status} errorfile {page}\n"
