"""Budgets for evictions and network policies: what they mean for our pods, together."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from k8s_check.exposed import INNER
from k8s_check.pod_shapes import Budget
from k8s_check.ray_shapes import Group, RayService
from k8s_check.render import Object
from k8s_check.selecting import other_pods, our_pods, selects

_AGENT: Final = 52365
"""Of every node; the operator asks it. No container declares it."""
_OPERATOR: Final = "kuberay-operator"
_OPERATOR_LABELS: Final = ("app.kubernetes.io/name", "app.kubernetes.io/component")
"""Where helm says so, and where KubeRay's own manifests do."""
_DASHBOARD: Final = 8265
_ANYWHERE: Final = ("0.0.0.0/0", "::/0")


def disruption_budget(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """A number, since a RayCluster has no scale subresource; on workers only, and not on all of them."""
    budget, selector, ours = Budget.model_validate(each["spec"]), each["spec"].get("selector"), our_pods(service)
    chosen = [group for group in service.cluster.worker_group_specs if selects(selector, ours[group.group_name])]
    on_head = selects(selector, ours["head"])
    if not chosen and not on_head:
        if _named_for(each, service) and not any(selects(selector, labels) for labels in other_pods(objects)):
            yield "selects no worker"
        return
    if on_head:
        yield "must not select the head: there is one, and no node under it could ever be drained"
    least = budget.min_available
    if budget.max_unavailable is not None or not isinstance(least, int):
        yield "needs an integer minAvailable: with a percentage or maxUnavailable no eviction is ever allowed"
        return
    fewest, most = (sum(getattr(group, f"{what}_replicas") for group in chosen) for what in ("min", "max"))
    if least < 1:
        yield f"minAvailable {least} keeps nothing"
    elif chosen and least >= most:
        yield f"minAvailable {least} allows no eviction while there are maxReplicas {most}"
    elif 0 < fewest <= least:  # with minReplicas 0 there may be nothing to keep, and nothing that is kept
        yield f"minAvailable {least} allows no eviction while there are minReplicas {fewest}"
    if budget.unhealthy_pod_eviction_policy != "AlwaysAllow":
        yield "unhealthyPodEvictionPolicy must be AlwaysAllow: a worker without a replica is not Ready, and would stay"


def network_policies(objects: list[Object], service: RayService) -> Iterator[str]:
    """Policies add up: what all of them together let in, for each of our groups that one of them closes."""
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    ours = our_pods(service)
    for each in policies:
        yield from _names(each, service, objects)
    for group, spec in service.groups():
        closing = [each["spec"] for each in policies if selects(each["spec"].get("podSelector"), ours[group])]
        kinds = {kind for each in closing for kind in each.get("policyTypes") or ["Ingress"]}
        if "Egress" in kinds and not any(each.get("egress") for each in closing):
            yield f"NetworkPolicy: policyTypes has Egress and there is no egress rule: {group} reaches nobody"
        elif "Egress" in kinds and not _lets_out(ours, [rule for each in closing for rule in each.get("egress") or []]):
            yield f"NetworkPolicy: {group}: egress must let the pods of the cluster reach each other on every port"
        if "Ingress" in kinds:
            rules = [rule for each in closing for rule in each.get("ingress") or []]
            scraped = any(each["kind"] == "PodMonitor" for each in objects)
            yield from (f"NetworkPolicy: {said}" for said in _ingress(group, spec, rules, ours, scraped))


def _names(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """A policy that is named for us and misses our pods closes nothing, and nothing says so."""
    where, selector, ours = (
        f"NetworkPolicy/{each['metadata']['name']}",
        each["spec"].get("podSelector"),
        our_pods(service),
    )
    missed = [group for group, labels in ours.items() if not selects(selector, labels)]
    if each["metadata"]["name"] == service.metadata.name:
        yield from (f"{where}: does not select the pods of {group}" for group in missed)
    elif _named_for(each, service) and not any(
        selects(selector, labels) for labels in (*ours.values(), *other_pods(objects))
    ):
        yield f"{where}: selects no pods that are here"


def _ingress(
    group: str, spec: Group, rules: list[dict[str, Any]], ours: dict[str, dict[str, str]], scraped: bool
) -> Iterator[str]:
    if not any(not rule.get("ports") and _lets_all_of(ours, rule) for rule in rules):
        yield f"{group}: must let the pods of the cluster reach each other on every port: Ray opens any"
    declared = {port.name: port.container_port for port in spec.container.ports}
    wanted = {name: number for name, number in declared.items() if name in ("serve", "serve-grpc", "dashboard")}
    if scraped:
        wanted |= {name: number for name, number in declared.items() if name.endswith("metrics")}
    for name, number in {**wanted, "Ray's agent": _AGENT}.items():
        if not any(_lets_in(rule, number, name) and not _only(ours, rule) for rule in rules):
            yield f"{group}: lets nobody reach port {number} ({name})"
    for rule in rules:
        if _lets_in(rule, _DASHBOARD, "dashboard"):
            yield from (f"{group}: {said}" for said in _operator(rule, ours))
        if _is_open(rule):
            for number, name in INNER.items():
                if _lets_in(rule, number, name):
                    yield f"{group}: opens port {number} ({name}) to everybody"


def _operator(rule: Mapping[str, Any], ours: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A label that is nearly the operator's: it would never deploy the Serve config. Helm may give it another name."""
    others = [
        peer["podSelector"]
        for peer in rule.get("from") or []
        if peer.get("podSelector") and not any(selects(peer["podSelector"], labels) for labels in ours.values())
    ]
    values = [str((each.get("matchLabels") or {}).get(key, "")) for each in others for key in _OPERATOR_LABELS]
    for value in values:
        typo = _OPERATOR not in value and difflib.get_close_matches(value, [_OPERATOR], cutoff=0.9)
        if (value == "kuberay" or typo) and _OPERATOR not in values:
            yield (
                f"port {_DASHBOARD} (dashboard): {value!r} is no label of KubeRay's operator: "
                f"{_OPERATOR_LABELS[0]} (helm) or {_OPERATOR_LABELS[1]}: {_OPERATOR}"
            )


def _lets_out(ours: Mapping[str, Mapping[str, str]], rules: list[dict[str, Any]]) -> bool:
    """Whether egress rules let our pods reach each other on all ports; a range of addresses may be that of pods."""
    every = [rule for rule in rules if not rule.get("ports")]
    return any(
        _lets_all_of(ours, {"from": rule.get("to")}) or any("ipBlock" in peer for peer in rule["to"]) for rule in every
    )


def _lets_all_of(ours: Mapping[str, Mapping[str, str]], rule: Mapping[str, Any]) -> bool:
    """Whether a rule lets all pods of the cluster in, be it by one peer or by several."""
    # a peer without a podSelector means all pods of some namespaces; that ours is one is left to the user
    peers = [each for each in rule.get("from") or [] if "ipBlock" not in each]
    return not rule.get("from") or all(
        any(selects(peer.get("podSelector", {}), labels) for peer in peers) for labels in ours.values()
    )


def _only(ours: Mapping[str, Mapping[str, str]], rule: Mapping[str, Any]) -> bool:
    """Whether a rule lets nobody in but the cluster itself."""
    peers = rule.get("from") or []
    return bool(peers) and all(
        peer.keys() == {"podSelector"} and peer["podSelector"]
        and any(selects(peer["podSelector"], labels) for labels in ours.values())
        for peer in peers
    )  # fmt: skip


def _lets_in(rule: Mapping[str, Any], number: int, name: str) -> bool:
    return not rule.get("ports") or any(
        port.get("protocol", "TCP") == "TCP"
        and (port.get("port") in (None, name, number)
             or (isinstance(port["port"], int) and port["port"] <= number <= port.get("endPort", port["port"])))
        for port in rule["ports"]
    )  # fmt: skip


def _is_open(rule: Mapping[str, Any]) -> bool:
    """Everybody, or every pod of every namespace: `namespaceSelector: {}` alone is no less."""
    return not rule.get("from") or any(
        ((peer.get("ipBlock") or {}).get("cidr") in _ANYWHERE and not peer["ipBlock"].get("except"))
        or (peer.get("namespaceSelector") == {} and not peer.get("podSelector"))
        for peer in rule["from"]
    )


def _named_for(each: Object, service: RayService) -> bool:
    return str(each["metadata"]["name"]).startswith(service.metadata.name)
