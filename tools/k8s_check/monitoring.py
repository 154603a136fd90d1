"""What Prometheus scrapes, and what rules and dashboards ask it for."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deployment.metrics import SPECS
from deployment.serve_file import parse_serve_text
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object
from k8s_check.selecting import our_pods, selects
from orca_core.errors import ConfigError

_METRIC: Final = re.compile(r"(?<![\w:])(?:ray_?)?orca_(\w+)(?![\w:])")
_SELECTOR: Final = re.compile(r"(?<![\w:])(ray_orca_\w+)\s*\{([^}]*)\}")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)\s*(?:=~|!~|!=|=)\s*"')
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
_TAGS: Final = {f"ray_{spec.name}{end}": spec.tags for spec in SPECS for end in _SUFFIXES[spec.kind]}
KNOWN_METRICS: Final = frozenset(_TAGS)
"""What Prometheus may be asked for."""
_ALL_TAGS: Final = frozenset(tag for tags in _TAGS.values() for tag in tags)
_EXPRESSIONS: Final = ("expr", "query", "definition")
_GROUP: Final = "monitoring.coreos.com"
_KINDS: Final = (
    "Alertmanager", "AlertmanagerConfig", "PodMonitor", "Probe", "Prometheus", "PrometheusAgent", "PrometheusRule",
    "ScrapeConfig", "ServiceMonitor", "ThanosRuler",
)  # fmt: skip


def kinds(objects: list[Object]) -> Iterator[str]:
    """Kinds of prometheus-operator are spelled as it spells them."""
    for each in objects:
        if str(each["apiVersion"]).startswith(f"{_GROUP}/") and each["kind"] not in _KINDS:
            near = difflib.get_close_matches(each["kind"], _KINDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{each['kind']}/{each['metadata']['name']}: no kind of {_GROUP}{hint}"


def pod_monitor(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """Scrapes ports that pods declare, of pods that are ours, where they are; several may share the work."""
    spec, ours = each["spec"], our_pods(service)
    monitors = [other["spec"] for other in objects if other["kind"] == "PodMonitor"]
    scraping = [one for one in monitors if any(selects(one.get("selector"), labels) for labels in ours.values())]
    if spec not in scraping and not str(each["metadata"]["name"]).startswith("orca"):
        return  # somebody else's
    for group, labels in ours.items():
        if not any(selects(one.get("selector"), labels) for one in scraping):
            yield f"does not select the pods of {group}"
    ports = {port.name for _, group in service.groups() for port in group.container.ports}
    for endpoint in spec.get("podMetricsEndpoints") or []:
        if "port" in endpoint and endpoint["port"] not in ports:
            yield f"port {endpoint['port']!r} is declared by no container"
        if endpoint.get("path", "/metrics") != "/metrics":
            yield f"path {endpoint['path']} is not where Ray has its metrics: /metrics"
    wanted = {service.head.container.port("metrics"), "metrics"}
    endpoints = [endpoint for one in scraping for endpoint in one.get("podMetricsEndpoints") or []]
    if not any(wanted & {endpoint.get("port"), endpoint.get("portNumber")} for endpoint in endpoints):
        yield "has no endpoint for the port metrics, where ours are"
    where = spec.get("namespaceSelector") or {}
    own, home = each["metadata"].get("namespace"), service.metadata.namespace or None
    looked_at = where.get("matchNames") or [own]
    if not where.get("any") and home not in looked_at:
        yield f"looks into {', '.join(map(str, looked_at))}, not into {home}"


def metrics_exist(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """Rules and dashboards ask for metrics and labels that there are."""
    for metric in sorted(metrics_in(each) - recorded(objects)):
        right = re.sub("^(ray_?)?", "ray_", metric)
        if metric in KNOWN_METRICS:
            continue
        if metric.startswith("ray_"):
            yield f"no metric is called {metric} (deployment/metrics.py)"
        elif right in KNOWN_METRICS:
            yield f"Prometheus knows {metric} as {right}"
    for expression in expressions(each):
        for metric, inside in _SELECTOR.findall(expression):
            yield from _labels(metric, _LABEL.findall(inside))
        if re.fullmatch(r"absent\(ray_orca_slots_total(\{[^}]*\})?\)", expression.strip()) and _may_be_none(service):
            yield "replicas.min is 0: an alert on absent(ray_orca_slots_total) alone pages for ever"


def _labels(metric: str, names: list[str]) -> Iterator[str]:
    """Labels of the cluster, the scrape or Ray pass; one that is ours and not this metric's, or nearly so, does not."""
    tags = _TAGS.get(metric, ())
    for name in names:
        near = difflib.get_close_matches(name, sorted(_ALL_TAGS), n=1, cutoff=0.85)
        if metric in _TAGS and name not in tags and near:
            yield f"{metric} has no label {name}; it has: {', '.join(tags) or 'none of ours'}"


def metrics_in(each: Object) -> set[str]:
    """Names of our metrics in all expressions of an object."""
    return {found.group() for text in expressions(each) for found in _METRIC.finditer(text)}


def expressions(each: Object) -> Iterator[str]:
    """PromQL of a rule's object, or of the dashboards in a ConfigMap (or of one dashboard)."""
    if each.get("kind") != "ConfigMap":
        yield from _expressions(each)
        return
    for name, text in (each.get("data") or {}).items():
        if name.endswith(".json"):
            try:
                yield from _expressions(json.loads(text))
            except ValueError:
                continue  # said by ``dashboards``


def queries(each: Object) -> Iterator[str]:
    """The expressions of a dashboard's panels: what is no query for names of labels."""
    return (text for text in expressions(each) if not text.startswith("label_values("))


def dashboards(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """JSON that asks for metrics there are."""
    for name, text in (each.get("data") or {}).items():
        if name.endswith(".json"):
            try:
                json.loads(text)
            except ValueError as error:
                yield f"{name} is not JSON: {error}"
    yield from metrics_exist(each, service, objects)


def recorded(objects: list[Object]) -> set[str]:
    """Names that recording rules make."""
    rules = [each for each in objects if each["kind"] == "PrometheusRule"]
    return {
        str(rule["record"])
        for each in rules for group in each["spec"].get("groups") or [] for rule in group.get("rules") or []
        if "record" in rule
    }  # fmt: skip


def _expressions(each: Any) -> Iterator[str]:
    if isinstance(each, Mapping):
        for key, value in each.items():
            if key in _EXPRESSIONS and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(each, list):
        for part in each:
            yield from _expressions(part)


def _may_be_none(service: RayService) -> bool:
    try:
        return parse_serve_text(service.spec.serve_config_v2).app.replicas.min == 0
    except ConfigError:
        return False
