"""All rules over the text of one overlay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel, ValidationError

from k8s_check import credentials, fields, kuberay, objects, pods, refusals, serving, sizes
from k8s_check.facts import Facts
from k8s_check.pod_shapes import Budget, ClaimSpec, JobSpec, StatefulSetSpec
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object, RenderError, parse

_SPECS: Final[dict[str, type[BaseModel]]] = {
    "PodDisruptionBudget": Budget,
    "Job": JobSpec,
    "StatefulSet": StatefulSetSpec,
    "PersistentVolumeClaim": ClaimSpec,
}


_GROUPS: Final = {
    "RayService": "ray.io", "Namespace": "", "ConfigMap": "", "PersistentVolumeClaim": "", "Secret": "", "Service": "",
    "Job": "batch", "StatefulSet": "apps", "PodDisruptionBudget": "policy", "NetworkPolicy": "networking.k8s.io",
    "Ingress": "networking.k8s.io", "PodMonitor": "monitoring.coreos.com", "PrometheusRule": "monitoring.coreos.com",
    "Gateway": "gateway.networking.k8s.io", "HTTPRoute": "gateway.networking.k8s.io",
    "GRPCRoute": "gateway.networking.k8s.io",
}  # fmt: skip
"""Of the kinds there are rules for. Others use the same words: Istio's Gateway, Calico's NetworkPolicy."""


def check_text(text: str, facts: Facts) -> list[str]:
    """What is wrong with the rendered objects of an overlay, one line each; empty where nothing is."""
    try:
        found = parse(text)
    except RenderError as error:
        return [str(error)]
    return check_objects(found, facts)


def check_objects(found: list[Object], facts: Facts) -> list[str]:
    """The same for objects that were parsed already."""
    found = [each for each in found if _is_of_its_group(each)]
    problems = [problem for each in found for problem in shape_problems(each)]
    services = [each for each in found if each["kind"] == "RayService"]
    if len(services) != 1:
        problems.append(f"there must be one RayService, there are {len(services)}")
    if problems:
        return problems
    service = RayService.model_validate(services[0])
    where = f"RayService/{service.metadata.name}"
    problems += [
        f"{where}: {problem}"
        for rule in (*kuberay.RULES, *refusals.RULES, *pods.RULES, credentials.api_keys, *sizes.RULES)
        for problem in rule(service, facts)
    ]
    problems += [f"{where}: {problem}" for problem in serving.check(service, facts)]
    return problems + list(objects.check(found, service))


def _is_of_its_group(each: Object) -> bool:
    group = str(each.get("apiVersion")).rpartition("/")[0]
    return _GROUPS.get(each["kind"], group) == group


def shape_problems(each: Object) -> Iterator[str]:
    """Unknown fields, wrong types and missing values of one object, as the API server would say."""
    kind, name = each["kind"], each.get("metadata", {}).get("name")
    yield from (f"{kind}/{name}: {place}: {said}" for place, said in fields.unknown(each, kind))
    model: type[BaseModel] | None = RayService if kind == "RayService" else _SPECS.get(kind)
    if model is None:
        return
    try:
        model.model_validate(each if kind == "RayService" else each.get("spec"))
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            place = ".".join(str(part) for part in problem["loc"] if part != "[key]")
            yield f"{kind}/{name}: {place}: {problem['msg'].replace('Input should be', 'must be', 1)}"
