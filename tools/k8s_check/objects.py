"""Everything beside the RayService: it has to fit to the pods the RayService makes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from deployment.metrics import SPECS
from deployment.serve_file import parse_serve_text
from k8s_check.pod_shapes import Budget, PodSpec
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object
from orca_core.errors import ConfigError

_METRIC: Final = re.compile(r"\bray_orca_\w+")
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
KNOWN_METRICS: Final = frozenset(f"ray_{spec.name}{end}" for spec in SPECS for end in _SUFFIXES[spec.kind])
"""What Prometheus may be asked for."""

_CLUSTER_WIDE: Final = ("Namespace",)


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """All of this module's rules over the objects of one overlay."""
    yield from namespaces(objects)
    yield from references(objects, service)
    for each in objects:
        rule = _BY_KIND.get(each["kind"])
        if rule is not None:
            name = each.get("metadata", {}).get("name")
            yield from (f"{each['kind']}/{name}: {problem}" for problem in rule(each, service))


def namespaces(objects: list[Object]) -> Iterator[str]:
    """All in one namespace: Secrets and services are looked for there."""
    found = {str(each["metadata"].get("namespace")) for each in objects if each["kind"] not in _CLUSTER_WIDE}
    if len(found) > 1:
        yield f"objects lie in several namespaces: {', '.join(sorted(found))}"


def references(objects: list[Object], service: RayService) -> Iterator[str]:
    """ConfigMaps and claims that pods mount come with them; Secrets are made by hand, and not looked for."""
    there = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for group, spec in service.groups():
        for volume in spec.template.spec.volumes:
            wanted = [("ConfigMap", volume.config_map.name)] if volume.config_map else []
            wanted += [("PersistentVolumeClaim", volume.persistent_volume_claim.claim_name)] if (
                volume.persistent_volume_claim) else []  # fmt: skip
            yield from (f"{group}: volume {volume.name!r}: no {kind} {name}" for kind, name in wanted
                        if (kind, name) not in there)  # fmt: skip


def disruption_budget(each: Object, service: RayService) -> Iterator[str]:
    """A number, since a RayCluster has no scale subresource; on workers only, and not on all of them."""
    budget = Budget.model_validate(each["spec"])
    if budget.max_unavailable is not None or not isinstance(budget.min_available, int):
        yield "needs an integer minAvailable: with a percentage or maxUnavailable no eviction is ever allowed"
        return
    groups = list(service.cluster.worker_group_specs)
    if budget.selector.match_labels.items() <= service.head.template.metadata.labels.items():
        yield "must not select the head: there is one, and no node under it could ever be drained"
    chosen = [group for group in groups if _selects(budget.selector.match_labels, group.template.metadata.labels)]
    fewest = sum(group.min_replicas for group in chosen)
    if not chosen:
        yield "selects no worker"
    elif budget.min_available >= fewest:
        yield f"minAvailable {budget.min_available} allows no eviction while there are minReplicas {fewest}"


def network_policy(each: Object, service: RayService) -> Iterator[str]:
    """Of the policy on our pods: the cluster with itself on all ports, and the doors for clients."""
    labels = each["spec"]["podSelector"].get("matchLabels", {})
    if not all(_selects(labels, spec.template.metadata.labels) for _, spec in service.groups()):
        return
    rules = each["spec"].get("ingress", [])
    inside = [rule for rule in rules if not rule.get("ports") and any(
        source.keys() == {"podSelector"} and source["podSelector"].get("matchLabels") == labels
        for source in rule.get("from", []))]  # fmt: skip
    if not inside:
        yield "must let the pods of the cluster reach each other on every port: Ray chooses its ports as it likes"
    allowed = {port["port"] for rule in rules for port in rule.get("ports", [])}
    for name in ("serve", "serve-grpc", "dashboard", "metrics"):
        number = service.head.container.port(name)
        if number is not None and number not in allowed:
            yield f"lets nobody reach port {number} ({name})"


def pod_monitor(each: Object, service: RayService) -> Iterator[str]:
    """Scrapes ports that pods declare, of pods that are ours."""
    labels = each["spec"]["selector"].get("matchLabels", {})
    ports: set[str] = set()
    for group, spec in service.groups():
        if not _selects(labels, spec.template.metadata.labels):
            yield f"does not select the pods of {group}"
        ports |= {port.name for port in spec.container.ports}
    for endpoint in each["spec"]["podMetricsEndpoints"]:
        if endpoint["port"] not in ports:
            yield f"port {endpoint['port']!r} is declared by no container"


def metrics_exist(each: Object, _: RayService) -> Iterator[str]:
    """Rules and dashboards ask for metrics that there are, and a dashboard is JSON."""
    for name, text in each.get("data", {}).items():
        if name.endswith(".json"):
            try:
                json.loads(text)
            except ValueError as error:
                yield f"{name} is not JSON: {error}"
    for metric in sorted(metrics_in(each)):
        if metric not in KNOWN_METRICS:
            yield f"no metric is called {metric} (deployment/metrics.py)"


def metrics_in(each: Object) -> set[str]:
    """Names of our metrics in an object, wherever they stand."""
    return set(_METRIC.findall(json.dumps(each)))


def serve_config_copy(each: Object, service: RayService) -> Iterator[str]:
    """A ConfigMap that carries the Serve config carries the one that is served."""
    copy = each.get("data", {}).get("serve-config.yaml")
    if copy is not None and copy != service.spec.serve_config_v2:
        yield "serve-config.yaml differs from serveConfigV2: list config-* before what copies it"


def config_map(each: Object, service: RayService) -> Iterator[str]:
    """Both rules for ConfigMaps."""
    yield from metrics_exist(each, service)
    yield from serve_config_copy(each, service)


def template(each: Object, service: RayService) -> Iterator[str]:
    """A Job or StatefulSet beside: pinned images, mounts with volumes, not as root."""
    pod = PodSpec.model_validate(each["spec"]["template"]["spec"])
    ours = service.head.container.image
    for container in (*pod.containers, *pod.init_containers):
        base, _, tag = container.image.rpartition("/")[2].partition(":")
        if tag in ("", "latest"):
            yield f"image {container.image!r} is not pinned"
        if base == "orca-serve" and container.image != ours:
            yield f"image {container.image!r} must be the service's own, {ours!r}"
        for mount in container.volume_mounts:
            claimed = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])]
            if mount.name not in [*claimed, *(volume.name for volume in pod.volumes)]:
                yield f"container {container.name}: volumeMount {mount.name!r} has no volume"
    if not pod.security_context.run_as_non_root:
        yield "securityContext must say runAsNonRoot"


def backends(each: Object, service: RayService) -> Iterator[str]:
    """A route leads to the service that the operator makes, on a port it has."""
    given = service.spec.serve_service
    ports = {port.port for port in given.spec.ports} if given else set()
    for rule in each["spec"]["rules"]:
        for backend in rule["backendRefs"]:
            if backend["name"] != f"{service.metadata.name}-serve-svc" or backend["port"] not in ports:
                yield f"backend {backend['name']}:{backend['port']} is not the serve service of the RayService"
        limit, longest = rule.get("timeouts", {}).get("request"), longest_request_s(service)
        if limit is not None and (seconds := _seconds(limit)) and seconds < longest:
            yield f"timeouts.request {limit} cuts streams: limits.max_request_seconds is {longest:g}"


def longest_request_s(service: RayService) -> float:
    """Seconds a request may take; 0 where the Serve config cannot be read, which is said elsewhere."""
    try:
        return parse_serve_text(service.spec.serve_config_v2).app.limits.max_request_seconds
    except ConfigError:
        return 0.0


def _seconds(duration: str) -> float:
    """Of the Gateway API's durations (GEP-2257): 1h30m, 330s, 500ms; 0s = no limit."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", duration))


def _selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


_BY_KIND: Final[Mapping[str, Callable[[dict[str, Any], RayService], Iterator[str]]]] = {
    "PodDisruptionBudget": disruption_budget,
    "NetworkPolicy": network_policy,
    "PodMonitor": pod_monitor,
    "PrometheusRule": metrics_exist,
    "ConfigMap": config_map,
    "Job": template,
    "StatefulSet": template,
    "HTTPRoute": backends,
    "GRPCRoute": backends,
}
