"""Ways to the head from outside: whoever reaches its dashboard can run code, and a token is all that is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from k8s_check.ray_shapes import RayService
from k8s_check.render import Object
from k8s_check.selecting import our_pods, selects

INNER: Final = {6379: "GCS", 8265: "dashboard", 52365: "agent"}
"""Whoever reaches these can run code, or could before there were tokens."""
_OUTSIDE: Final = ("LoadBalancer", "NodePort")
_LIVE: Final = ("ray.io/cluster", "ray.io/identifier", "ray.io/serve")
"""Labels whose values the operator makes up."""


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """The operator's own service and ingress, and those that lie beside the RayService."""
    head, where = service.cluster.head_group_spec, f"RayService/{service.metadata.name}: head"
    if head.service_type in _OUTSIDE:
        yield f"{where}: serviceType {head.service_type} opens the dashboard to everybody outside"
    if head.head_service is not None and head.head_service.spec.type in _OUTSIDE:
        yield f"{where}: headService.spec.type {head.head_service.spec.type} opens the dashboard to everybody outside"
    if head.enable_ingress:
        yield f"{where}: enableIngress opens the dashboard to everybody outside"
    inner = dict(_inner_ports(objects, service))
    for each in objects:
        name, spec = f"{each['kind']}/{each['metadata']['name']}", each.get("spec") or {}
        if each["kind"] == "Service" and each["metadata"]["name"] in inner:
            if spec.get("type") in _OUTSIDE or spec.get("externalIPs"):
                what = ", ".join(INNER[number] for number in sorted(set(inner[each["metadata"]["name"]].values())))
                yield f"{name}: opens the head's {what} to everybody outside"
        elif each["kind"] == "Ingress":
            for backend, port in _backends(spec):
                if backend == f"{service.metadata.name}-head-svc" or port in inner.get(backend, {}):
                    yield f"{name}: backend {backend}:{port} is the head: its dashboard is for nobody outside"


def _inner_ports(objects: list[Object], service: RayService) -> Iterator[tuple[str, dict[Any, int]]]:
    """Services that lead to the head: their ports, by number and by name, that end at one of ``INNER``."""
    labels = our_pods(service)["head"]
    names = {port.name: port.container_port for port in service.head.container.ports if port.name}
    home = service.metadata.namespace or None
    for each in objects:
        spec = each.get("spec") or {}
        wanted = {key: value for key, value in (spec.get("selector") or {}).items() if key not in _LIVE}
        if each["kind"] != "Service" or each["metadata"].get("namespace") != home or not spec.get("selector"):
            continue
        if not selects({"matchLabels": wanted}, labels):
            continue
        found: dict[Any, int] = {}
        for port in spec.get("ports") or []:
            target = port.get("targetPort") or port["port"]
            number = names.get(target, 0) if isinstance(target, str) else target
            if number in INNER:
                found |= {port["port"]: number, port.get("name"): number}
        if found:
            yield each["metadata"]["name"], found


def _backends(spec: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Services of an Ingress, with the number or name of the port."""
    paths = [path for rule in spec.get("rules") or [] for path in (rule.get("http") or {}).get("paths") or []]
    for backend in (spec.get("defaultBackend"), *(path.get("backend") for path in paths)):
        to = (backend or {}).get("service")
        if to:
            port = to.get("port") or {}
            yield to.get("name"), port.get("number", port.get("name"))
