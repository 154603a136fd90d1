"""The head's state in a Redis that comes with the manifests. One from elsewhere is not looked at."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from k8s_check.ray_shapes import FaultTolerance, RayService
from k8s_check.render import Object
from k8s_check.selecting import our_pods, selects, templates


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """From ``redisAddress`` over the Service to one pod with a disk, and a password that both know."""
    options = service.cluster.gcs_fault_tolerance_options
    if options is None:
        return
    host, _, text = options.redis_address.rpartition("//")[2].rpartition(":")
    services = {str(each["metadata"]["name"]): each for each in objects if each["kind"] == "Service"}
    where = f"redisAddress {options.redis_address}"
    if not host or not text.isdigit():
        yield f"{where} must be host:port"
        return
    name, *rest = host.split(".")
    if len(rest) > 1 and rest[1] != "svc":
        return  # of another domain
    if name not in services:
        near = difflib.get_close_matches(name, services, n=1, cutoff=0.8)
        if near:
            yield f"{where}: there is no Service of that name; did you mean {near[0]}?"
        return
    own = services[name]["metadata"].get("namespace") or ""
    if rest and rest[0] != own:
        yield f"{where}: the Service {name} that is here is in namespace {own}"
        return
    if not rest and own != service.metadata.namespace:
        yield f"{where}: the Service is in namespace {own}, and has to be named with it"
    yield from (f"{where}: {said}" for said in _service(services[name], int(text), options, objects, service))


def _service(
    each: Object, port: int, options: FaultTolerance, objects: list[Object], service: RayService
) -> Iterator[str]:
    selector = each["spec"].get("selector") or {}
    behind = [
        (made_by, template) for made_by, template in templates(objects)
        if selector and selects({"matchLabels": selector}, (template.get("metadata") or {}).get("labels") or {})
    ]  # fmt: skip
    if not behind:
        yield "its Service selects no pods that are here"
    target = next((one.get("targetPort", one["port"]) for one in each["spec"]["ports"] if one["port"] == port), None)
    if target is None:
        yield f"its Service has no port {port}"
    for made_by, template in behind:
        redis = template["spec"]["containers"][0]
        declared = {one.get("name"): one["containerPort"] for one in redis.get("ports") or []}
        number = declared.get(target, target) if isinstance(target, str) else target
        if target is not None and declared and number not in declared.values():
            yield f"its Service's targetPort {target!r} is no port of the pod"
        alone = not re.search(r"\.conf|replicaof|cluster-enabled", _words(redis)) and "redis-server" in _words(redis)
        if alone and made_by["spec"].get("replicas", 1) != 1:
            yield f"{made_by['kind']} has {made_by['spec']['replicas']} replicas, which know nothing of each other"
        yield from _keeps(redis)
        yield from _password(redis, options)
        yield from _reachable(template["metadata"]["labels"], number, objects, service)


def _keeps(redis: dict[str, Any]) -> Iterator[str]:
    words = _words(redis)
    if "redis-server" in words and not ("--appendonly yes" in words or "--save" in words or ".conf" in words):
        yield "redis-server needs --appendonly yes, or its pod's end is the end of the head's state"


def _password(redis: dict[str, Any], options: FaultTolerance) -> Iterator[str]:
    given = options.redis_password
    ours = given.value_from.secret_key_ref if given is not None and given.value_from is not None else None
    if "--requirepass" not in _words(redis):
        return
    if given is None:
        yield "it wants a password (--requirepass), redisPassword is missing"
    theirs = [ref for one in redis.get("env") or [] if (ref := (one.get("valueFrom") or {}).get("secretKeyRef"))]
    if ours is not None and theirs and (ours.name, ours.key) not in [(one["name"], one["key"]) for one in theirs]:
        yield f"redisPassword is {ours.name}/{ours.key}, the pod's is {theirs[0]['name']}/{theirs[0]['key']}"


def _reachable(labels: dict[str, str], port: Any, objects: list[Object], service: RayService) -> Iterator[str]:
    """A policy on Redis lets head and workers in."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    closing = [each for each in policies if selects(each.get("podSelector"), labels)]
    closing = [each for each in closing if "Ingress" in (each.get("policyTypes") or ["Ingress"])]
    rules = [rule for each in closing for rule in each.get("ingress") or []]
    if closing and not any(_lets_in(rule, our_pods(service)["head"], port) for rule in rules):
        yield f"the NetworkPolicy on its pods does not let the head reach port {port}"


def _lets_in(rule: dict[str, Any], labels: dict[str, str], port: Any) -> bool:
    """A port by name and a peer by namespace or address are taken for the right ones."""
    ports, peers = rule.get("ports"), rule.get("from")
    on_port = not ports or any(one.get("port") in (port, None) or isinstance(one["port"], str) for one in ports)
    return on_port and (not peers or any(selects(peer.get("podSelector", {}), labels) for peer in peers))


def _words(container: dict[str, Any]) -> str:
    return " ".join(map(str, [*(container.get("command") or []), *(container.get("args") or [])]))
