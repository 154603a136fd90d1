"""Small changes that break a rendered overlay; the tables of them are in test_broken.py and broken_*.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s_check.render import Object

CLUSTER = "spec.rayClusterConfig"
HEAD = f"{CLUSTER}.headGroupSpec"
WORKERS = f"{CLUSTER}.workerGroupSpecs.0"
HEAD_POD, POD = f"{HEAD}.template.spec", f"{WORKERS}.template.spec"
HEAD_RAY, RAY = f"{HEAD_POD}.containers.0", f"{POD}.containers.0"
INCREMENTAL = {
    "type": "NewClusterWithIncrementalUpgrade",
    "clusterUpgradeOptions": {"gatewayClassName": "x", "stepSizePercent": 10, "intervalSeconds": 5},
}

Change = Callable[[list[Object]], None]
Case = tuple[str, Change, str]
"""Overlay, change, and what must be said."""


def the(objects: list[Object], kind: str) -> Object:
    """The one of a kind beside Redis', or of ``Kind/name``."""
    kind, _, name = kind.partition("/")
    of_kind = [each for each in objects if each["kind"] == kind]
    (found,) = [
        each
        for each in of_kind
        if each["metadata"]["name"] == name or (not name and each["metadata"]["name"] != "orca-redis")
    ]
    return found


def holder(each: Any, path: str) -> tuple[Any, Any]:
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        each = each[part]
    return each, last


def put(path: str, value: Any, kind: str = "RayService") -> Change:
    def change(objects: list[Object]) -> None:
        place, last = holder(the(objects, kind), path)
        place[last] = value

    return change


def drop(path: str, kind: str = "RayService") -> Change:
    def change(objects: list[Object]) -> None:
        place, last = holder(the(objects, kind), path)
        del place[last]

    return change


def add(path: str, value: Any, kind: str = "RayService") -> Change:
    return lambda objects: holder(the(objects, kind), path)[0][path.rpartition(".")[2]].append(value)


def env(container: str, name: str, value: str | None) -> Change:
    """Set a variable of a container, or take it away."""

    def change(objects: list[Object]) -> None:
        place, last = holder(the(objects, "RayService"), container)
        others = [each for each in place[last]["env"] if each["name"] != name]
        place[last]["env"] = others if value is None else [*others, {"name": name, "value": value}]

    return change


def config(old: str, new: str) -> Change:
    """Change the text of the embedded Serve config, and the copy of it that the model's Job has."""

    def change(objects: list[Object]) -> None:
        service = the(objects, "RayService")
        assert old in service["spec"]["serveConfigV2"]
        service["spec"]["serveConfigV2"] = service["spec"]["serveConfigV2"].replace(old, new)
        for each in objects:
            if each["kind"] == "ConfigMap" and "serve-config.yaml" in each["data"]:
                each["data"]["serve-config.yaml"] = service["spec"]["serveConfigV2"]

    return change


def both(*changes: Change) -> Change:
    return lambda objects: [change(objects) for change in changes] and None


def text(kind: str, key: str, old: str, new: str) -> Change:
    """Change a text in the data of a ConfigMap."""

    def change(objects: list[Object]) -> None:
        data = the(objects, kind)["data"]
        assert old in data[key]
        data[key] = data[key].replace(old, new)

    return change
