"""Which pods a selector means: by the labels of a template, and by those that KubeRay adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k8s_check.ray_shapes import RayService
from k8s_check.render import Object

Labels = Mapping[str, str]


def selects(selector: Any, labels: Labels) -> bool:
    """Whether a LabelSelector means pods with these labels; an empty one means all, none at all means none."""
    if not isinstance(selector, Mapping):
        return False
    wanted = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or []
    )


def our_pods(service: RayService) -> dict[str, dict[str, str]]:
    """Labels of the pods of head and worker groups, by the group's name."""
    found = {}
    for group, spec in service.groups():
        head = spec is service.head
        kuberay = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator"}
        always = {"ray.io/node-type": "head" if head else "worker", "ray.io/group": "headgroup" if head else group,
                  "ray.io/is-ray-node": "yes"}  # fmt: skip
        found[group] = {**kuberay, **spec.template.metadata.labels, **always}
    return found


def templates(objects: list[Object]) -> Iterator[tuple[Object, dict[str, Any]]]:
    """Objects beside the RayService that make pods, with the template of their pods."""
    for each in objects:
        template = (each.get("spec") or {}).get("template") if isinstance(each.get("spec"), Mapping) else None
        if isinstance(template, dict) and "spec" in template:
            yield each, template


def other_pods(objects: list[Object]) -> list[dict[str, str]]:
    """Labels of the pods of everything else that is here."""
    return [(template.get("metadata") or {}).get("labels") or {} for _, template in templates(objects)]


def _holds(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, values = expression.get("key", ""), expression.get("values") or []
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }.get(str(expression.get("operator")), False)
