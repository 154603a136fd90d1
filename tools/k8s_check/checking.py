"""All rules over the text of one overlay."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from k8s_check import kuberay, objects, pods, serving
from k8s_check.facts import Facts
from k8s_check.pod_shapes import Budget, JobSpec, StatefulSetSpec
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object, RenderError, parse

_SPECS: Final[dict[str, type[BaseModel]]] = {
    "PodDisruptionBudget": Budget,
    "Job": JobSpec,
    "StatefulSet": StatefulSetSpec,
}


def check_text(text: str, facts: Facts) -> list[str]:
    """What is wrong with the rendered objects of an overlay, one line each; empty where nothing is."""
    try:
        found = parse(text)
    except RenderError as error:
        return [str(error)]
    return check_objects(found, facts)


def check_objects(found: list[Object], facts: Facts) -> list[str]:
    """The same for objects that were parsed already."""
    problems = [problem for each in found for problem in shape_problems(each)]
    services = [each for each in found if each["kind"] == "RayService"]
    if len(services) != 1:
        problems.append(f"there must be one RayService, there are {len(services)}")
    if problems:
        return problems
    service = RayService.model_validate(services[0])
    where = f"RayService/{service.metadata.name}"
    problems += [f"{where}: {problem}" for rule in (*kuberay.RULES, *pods.RULES) for problem in rule(service, facts)]
    problems += [f"{where}: {problem}" for problem in serving.check(service, facts)]
    return problems + list(objects.check(found, service))


def shape_problems(each: Object) -> Iterator[str]:
    """Unknown fields, wrong types and missing values of one object, as the API server would say."""
    kind, name = each["kind"], each.get("metadata", {}).get("name")
    model: type[BaseModel] | None = RayService if kind == "RayService" else _SPECS.get(kind)
    if model is None:
        return
    try:
        model.model_validate(each if kind == "RayService" else each.get("spec"))
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            place = [part for part in problem["loc"] if part != "[key]"]
            yield f"{kind}/{name}: {'.'.join(map(str, place))}: {_say(model, problem['type'], problem['msg'], place)}"


def _say(model: type[BaseModel], kind: str, message: str, place: list[Any]) -> str:
    if kind != "extra_forbidden":
        return message.replace("Input should be", "must be", 1)
    near = difflib.get_close_matches(str(place[-1]), sorted(_aliases(model, set())), n=1, cutoff=0.6)
    return "unknown field" + (f"; did you mean {near[0]}?" if near else " (or one to be added to k8s_check)")


def _aliases(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[str]:
    """Names of all fields below a type."""
    seen.add(model)
    names: set[str] = set()
    for key, field in model.model_fields.items():
        names.add(field.alias or key)
        for part in _types(field.annotation):
            if part not in seen:
                names |= _aliases(part, seen)
    return names


def _types(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _types(part)
