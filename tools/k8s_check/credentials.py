"""Secrets: the file of API keys on head and workers, and Secrets that lie beside the RayService.

A Secret that is not here is made by hand; one that is here has to be the one that pods ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from deployment.config_sections import API_KEYS_ENVIRONMENT
from k8s_check.facts import Facts
from k8s_check.pod_shapes import PodSpec, SecretVolume
from k8s_check.ray_shapes import Group, RayService
from k8s_check.render import Object
from k8s_check.selecting import templates
from k8s_check.shapes import ValueFrom

_HASH: Final = r"-[a-z0-9]{10}"
"""What kustomize's generators append."""

Wanted = tuple[str, str, str, str | None]
"""Who asks, for which kind, of which name, and for which key of it, where that is known."""


def api_keys(service: RayService, _: Facts) -> Iterator[str]:
    """A file of API keys comes from one Secret, mounted as a folder so that changes arrive."""
    from_secret: dict[str, str] = {}
    for group, spec in service.groups():
        path = spec.container.value(API_KEYS_ENVIRONMENT)
        if path is None:
            continue
        folder = str(PurePosixPath(path).parent)
        mount = next((each for each in spec.container.volume_mounts if each.mount_path in (folder, path)), None)
        secret = _secret_at(spec, folder)
        if mount is None:
            yield f"{group}: {API_KEYS_ENVIRONMENT} names {path}, but nothing is mounted at {folder}"
        elif mount.sub_path is not None:
            yield f"{group}: the API keys must not be mounted by subPath: a changed Secret would never arrive"
        elif secret is None:
            yield f"{group}: the API keys must come from a Secret"
        elif _key_of(secret, PurePosixPath(path).name) is None:
            yield f"{group}: volume {mount.name!r}: items put no file {PurePosixPath(path).name} there"
        else:
            from_secret[group] = f"{secret.secret_name}/{_key_of(secret, PurePosixPath(path).name)}"
    for group, where in from_secret.items():
        if where != from_secret.get("head", where):
            yield f"{group}: the API keys come from the Secret {where}, the head's from {from_secret['head']}"


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """A Secret or ConfigMap that is here under a generated name, in another namespace, or without the key."""
    yield from dict.fromkeys(_check(objects, service))  # a pod may ask for the same more than once


def _check(objects: list[Object], service: RayService) -> Iterator[str]:
    home = service.metadata.namespace or None
    keys = {
        (each["kind"], each["metadata"].get("namespace"), str(each["metadata"]["name"])): {
            *(each.get("data") or {}), *(each.get("stringData") or {}), *(each.get("binaryData") or {}),
        }
        for each in objects if each["kind"] in ("Secret", "ConfigMap")
    }  # fmt: skip
    for who, kind, name, key in _wanted(objects, service):
        if (kind, home, name) in keys:
            if key is not None and key not in keys[kind, home, name]:
                yield f"{who}: {kind} {name} has no key {key}; it has: {', '.join(sorted(keys[kind, home, name]))}"
            continue
        for of_kind, namespace, there in keys:
            if of_kind == kind and there == name:
                yield f"{who}: {kind} {name} is in namespace {namespace}, the pods are in {home}"
            elif of_kind == kind and re.fullmatch(re.escape(name) + _HASH, there):
                yield (
                    f"{who}: no {kind} {name}: kustomize calls it {there}, and does not say so in a RayService: "
                    "options: {disableNameSuffixHash: true}"
                )


def _wanted(objects: list[Object], service: RayService) -> Iterator[Wanted]:
    for group, spec in service.groups():
        yield from _of_pod(f"RayService/{service.metadata.name}: {group}", spec.template.spec)
        path = spec.container.value(API_KEYS_ENVIRONMENT)
        secret = None if path is None else _secret_at(spec, str(PurePosixPath(path).parent))
        if path is not None and secret is not None:
            who = f"RayService/{service.metadata.name}: {group}"
            yield who, "Secret", secret.secret_name, _key_of(secret, PurePosixPath(path).name)
    options = service.cluster.gcs_fault_tolerance_options
    if options is not None and options.redis_password is not None:
        yield from _referred(f"RayService/{service.metadata.name}: redisPassword", options.redis_password.value_from)
    for each, template in templates(objects):
        yield from _of_pod(f"{each['kind']}/{each['metadata']['name']}", PodSpec.model_validate(template["spec"]))


def _of_pod(who: str, pod: PodSpec) -> Iterator[Wanted]:
    for volume in pod.volumes:
        if volume.secret:
            yield who, "Secret", volume.secret.secret_name, None
            yield from ((who, "Secret", volume.secret.secret_name, each.key) for each in volume.secret.items)
        if volume.config_map:
            yield who, "ConfigMap", volume.config_map.name, None
    for container in (*pod.containers, *pod.init_containers):
        for variable in container.env:
            yield from _referred(f"{who}: container {container.name}: env {variable.name}", variable.value_from)


def _referred(who: str, source: ValueFrom | None) -> Iterator[Wanted]:
    if source is not None and source.secret_key_ref is not None:
        yield who, "Secret", source.secret_key_ref.name, source.secret_key_ref.key


def _secret_at(spec: Group, folder: str) -> SecretVolume | None:
    """The Secret that is mounted as this folder."""
    mounts = [mount.name for mount in spec.container.volume_mounts if mount.mount_path == folder]
    return next((each.secret for each in spec.template.spec.volumes if each.name in mounts and each.secret), None)


def _key_of(secret: SecretVolume, file: str) -> str | None:
    """The key whose value becomes this file."""
    return next((each.key for each in secret.items if each.path == file), None) if secret.items else file
