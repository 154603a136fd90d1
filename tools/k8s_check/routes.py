"""Gateways and routes: the way of clients from outside to the serve service."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deployment.config_sections import API_KEYS_ENVIRONMENT
from deployment.serve_file import parse_serve_text
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object
from orca_core.errors import ConfigError

_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_FACES: Final = {"GRPCRoute": "serve-grpc", "HTTPRoute": "serve"}


def route(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """A route of ours leads to the serve service on a port it has, in time, from a listener there is."""
    backends = [
        backend for rule in each["spec"].get("rules") or [] for backend in rule.get("backendRefs") or []
        if backend.get("kind", "Service") == "Service" and _is_ours(str(backend.get("name")), service)
    ]  # fmt: skip
    if not backends:
        return  # somebody else's
    yield from _backends(each, backends, service, objects)
    for rule in each["spec"]["rules"]:
        for name, limit in (rule.get("timeouts") or {}).items():
            seconds, longest = _seconds(str(limit)), longest_request_s(service)
            if seconds and seconds < longest:
                yield f"timeouts.{name} {limit} cuts streams: limits.max_request_seconds is {longest:g}"
    yield from _parents(each, service, objects)


def gateway(each: Object, _: RayService, __: list[Object]) -> Iterator[str]:
    """A listener that ends TLS has something to show."""
    for listener in each["spec"].get("listeners") or []:
        tls = listener.get("tls") or {}
        ends = listener.get("protocol") == "HTTPS" or (
            listener.get("protocol") == "TLS" and tls.get("mode") != "Passthrough"
        )
        if ends and tls.get("mode", "Terminate") != "Terminate":
            yield f"listener {listener['name']}: HTTPS must end here (mode Terminate): the pods speak no TLS"
        elif ends and not (tls.get("certificateRefs") or tls.get("options")):
            yield f"listener {listener['name']}: needs certificateRefs"


def longest_request_s(service: RayService) -> float:
    """Seconds a request may take; 0 where the Serve config cannot be read, which is said elsewhere."""
    try:
        return parse_serve_text(service.spec.serve_config_v2).app.limits.max_request_seconds
    except ConfigError:
        return 0.0


def _backends(
    each: Object, backends: list[dict[str, Any]], service: RayService, objects: list[Object]
) -> Iterator[str]:
    given = service.spec.serve_service
    ports = {port.port: port.name for port in given.spec.ports} if given else {}
    for backend in backends:
        where = f"backend {backend['name']}:{backend.get('port')}"
        if backend["name"].endswith("-head-svc"):
            yield f"{where} is the head: its dashboard is for nobody outside"
        elif backend["name"] != _serve_service(service) or backend.get("port") not in ports:
            yield f"{where} is not the serve service of the RayService"
        elif each["kind"] == "GRPCRoute" and ports[backend["port"]] != "serve-grpc":
            yield f"{where} is the HTTP face, a GRPCRoute needs the port serve-grpc"
    face = _FACES[each["kind"]]
    others = [other for other in objects if other["kind"] == each["kind"] and other is not each]
    if (
        each["kind"] == "HTTPRoute"
        and not others
        and face not in {ports.get(backend.get("port", 0)) for backend in backends}
    ):
        yield f"no backend of it is the port {face}: the HTTP face has no route"


def _parents(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    gateways = {str(other["metadata"]["name"]): other for other in objects if other["kind"] == "Gateway"}
    for parent in each["spec"].get("parentRefs") or []:
        if parent.get("kind", "Gateway") != "Gateway" or "namespace" in parent:
            continue
        if parent["name"] not in gateways:
            near = difflib.get_close_matches(parent["name"], gateways, n=1, cutoff=0.7)  # it may be made elsewhere
            yield from (f"parentRef {parent['name']}: the Gateway here is {name}" for name in near)
            continue
        listeners = gateways[parent["name"]]["spec"].get("listeners") or []
        found = [one for one in listeners if parent.get("sectionName") in (None, one["name"])]
        if not found:
            yield f"parentRef {parent['name']}: no listener is called {parent['sectionName']}"
        elif not any(_meet(one.get("hostname"), each["spec"].get("hostnames")) for one in found):
            yield f"hostnames {', '.join(each['spec']['hostnames'])} are not those of the listener"
        if _has_keys(service) and any(one.get("protocol") == "HTTP" for one in found) and not _redirects(each):
            yield "the listener is plain HTTP: API keys would go in clear"


def _meet(hostname: str | None, hostnames: list[str] | None) -> bool:
    if not hostname or not hostnames:
        return True
    return any(one == hostname or _under(one, hostname) or _under(hostname, one) for one in hostnames)


def _under(name: str, wildcard: str) -> bool:
    return wildcard.startswith("*.") and name.endswith(wildcard[1:])


def _redirects(each: Object) -> bool:
    filters = [one for rule in each["spec"]["rules"] for one in rule.get("filters") or []]
    return any(one.get("type") == "RequestRedirect" for one in filters)


def _has_keys(service: RayService) -> bool:
    return any(spec.container.value(API_KEYS_ENVIRONMENT) is not None for _, spec in service.groups())


def _serve_service(service: RayService) -> str:
    given = service.spec.serve_service
    return (given.metadata.name if given else "") or f"{service.metadata.name}-serve-svc"


def _is_ours(backend: str, service: RayService) -> bool:
    """The serve service, a name that is nearly its, or the head's."""
    wanted = _serve_service(service)
    near = difflib.get_close_matches(backend, [wanted], cutoff=0.85)
    return bool(near) or backend == f"{service.metadata.name}-head-svc"


def _seconds(duration: str) -> float:
    """Of the Gateway API's durations (GEP-2257): 1h30m, 330s, 500ms; 0s = no limit."""
    units: Mapping[str, float] = _UNITS
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", duration))
