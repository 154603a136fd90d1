"""Weights on a shared volume: who fills it, who waits for it, and that all mean the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from deployment.serve_file import parse_serve_text
from k8s_check.pod_shapes import PodSpec
from k8s_check.ray_shapes import RayService, Workers
from k8s_check.render import Object
from k8s_check.room import replicas_on
from k8s_check.selecting import templates
from k8s_check.shapes import Container
from orca_core.errors import ConfigError

_FIND: Final = "find_model.py"
_CACHE: Final = "HF_HUB_CACHE"
_OFFLINE: Final = "HF_HUB_OFFLINE"


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """All of this module's rules."""
    yield from _claims(objects, service)
    for group, spec in service.groups():
        pod = spec.template.spec
        cache = spec.container.value(_CACHE)
        reads = isinstance(spec, Workers) and cache is not None and _offline(spec.container) and _serves(spec, service)
        if reads and not any(_is_under(str(cache), mount.mount_path) for mount in spec.container.volume_mounts):
            yield f"RayService/{service.metadata.name}: {group}: nothing is mounted at {_CACHE} {cache}"
        for container in pod.init_containers:
            where = f"RayService/{service.metadata.name}: {group}: container {container.name}"
            yield from (f"{where}: {said}" for said in _script(container, pod, objects))
            if _runs_find(container) and cache and container.value(_CACHE) != cache:
                yield f"{where}: {_CACHE} is {container.value(_CACHE)}, the worker's is {cache}"
    for each, template in templates(objects):
        if each["kind"] == "Job":
            pod = PodSpec.model_validate(template["spec"])
            for container in pod.containers:
                if _runs_find(container):
                    yield from (f"Job/{each['metadata']['name']}: {said}" for said in _job(container, pod, service))
                    yield from (f"Job/{each['metadata']['name']}: {said}" for said in _script(container, pod, objects))


def _job(container: Container, pod: PodSpec, service: RayService) -> Iterator[str]:
    """The download writes where the workers read."""
    if _offline(container):
        yield f"{_OFFLINE} is set: it downloads nothing"
    own = container.value(_CACHE)
    for group in service.cluster.worker_group_specs:
        cache = group.container.value(_CACHE)
        if cache is None or not _offline(group.container):
            continue
        wanted = _claim(group.template.spec, group.container, cache)
        found = _claim(pod, container, own) if own else None
        if own != cache:
            yield f"{_CACHE} is {own}, {group.group_name} have {cache}"
        elif wanted is not None and found != wanted:
            yield f"{_CACHE} {own} lies on the claim {found}, {group.group_name} have {wanted}"
    for mount in container.volume_mounts:
        volumes = [each.persistent_volume_claim for each in pod.volumes if each.name == mount.name]
        sealed = mount.read_only or any(claim is not None and claim.read_only for claim in volumes)
        if own and sealed and _is_under(own, mount.mount_path):
            yield f"{_CACHE} {own} is mounted readOnly"


def _script(container: Container, pod: PodSpec, objects: list[Object]) -> Iterator[str]:
    """A script out of a ConfigMap that is here is in it."""
    maps = {str(each["metadata"]["name"]): each.get("data") or {} for each in objects if each["kind"] == "ConfigMap"}
    words = " ".join([*container.command, *container.args])
    for mount in container.volume_mounts:
        volume = next((each for each in pod.volumes if each.name == mount.name), None)
        if volume is None or volume.config_map is None or volume.config_map.name not in maps:
            continue
        if f"{mount.mount_path}/{_FIND}" in words and _FIND not in maps[volume.config_map.name]:
            yield f"ConfigMap {volume.config_map.name} has no {_FIND}"


def _claims(objects: list[Object], service: RayService) -> Iterator[str]:
    """A claim that several pods mount can be mounted by several: they may be on different nodes."""
    modes = {
        str(each["metadata"]["name"]): each["spec"].get("accessModes") or []
        for each in objects if each["kind"] == "PersistentVolumeClaim"
    }  # fmt: skip
    for group in service.cluster.worker_group_specs:
        pod = group.template.spec
        if group.max_replicas < 2 or "kubernetes.io/hostname" in pod.node_selector:
            continue
        for volume in pod.volumes:
            name = volume.persistent_volume_claim.claim_name if volume.persistent_volume_claim else None
            if name in modes and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes[name]):
                yield f"PersistentVolumeClaim/{name}: {', '.join(modes[name])}: {group.group_name} may wait for it"


def _claim(pod: PodSpec, container: Container, path: str) -> str | None:
    """The claim a path lies on."""
    for mount in container.volume_mounts:
        if _is_under(path, mount.mount_path):
            for volume in pod.volumes:
                if volume.name == mount.name and volume.persistent_volume_claim:
                    return volume.persistent_volume_claim.claim_name
    return None


def _serves(group: Workers, service: RayService) -> bool:
    """Whether a pod of the group holds a replica: one for ingresses alone reads no weights."""
    try:
        return replicas_on(group, parse_serve_text(service.spec.serve_config_v2).app) > 0
    except ConfigError:
        return False  # said elsewhere


def _is_under(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _offline(container: Container) -> bool:
    value: Any = container.value(_OFFLINE)
    return value is not None and value.lower() in ("1", "true", "on", "yes")


def _runs_find(container: Container) -> bool:
    return _FIND in " ".join([*container.command, *container.args])
