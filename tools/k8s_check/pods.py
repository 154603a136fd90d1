"""The pods of head and workers: what they get, what they may do, and how they leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from deployment.config_sections import API_KEYS_ENVIRONMENT
from k8s_check.facts import NEEDED, SERVE_ENVIRONMENT, SHARED_PREFIXES, Facts
from k8s_check.kuberay import Rule
from k8s_check.ray_shapes import Group, RayService
from k8s_check.shapes import Container

GPU: Final = "nvidia.com/gpu"
_USER: Final = (1000, 100)
"""Of the image."""
_SIZES: Final = ("num-cpus", "num-gpus", "memory", "resources")


def resources(service: RayService, _: Facts) -> Iterator[str]:
    """Ray sizes itself by the limits; GPUs and memory cannot be overcommitted."""
    for group, spec in service.groups():
        requests, limits = spec.container.resources.requests, spec.container.resources.limits
        gpus = requests.get(GPU), limits.get(GPU)
        if gpus[0] != gpus[1]:
            yield f"{group}: {GPU} request {gpus[0]} must equal its limit {gpus[1]}"
        if limits.get("memory") is None:
            yield f"{group}: needs a memory limit: Ray would size itself by the node"
        elif gpus[1] is not None and requests.get("memory") != limits["memory"]:
            yield f"{group}: memory request {requests.get('memory')} must equal its limit {limits['memory']}"
        if limits.get("cpu") is None:
            yield f"{group}: needs a cpu limit: Ray would count the CPUs of the node"
        set_by_hand = [key for key in _SIZES if key in spec.ray_start_params]
        if spec is not service.head and set_by_hand:
            yield f"{group}: rayStartParams must leave {', '.join(set_by_hand)} to the limits"
    if GPU in service.head.container.resources.limits:
        yield "head: must have no GPU: nothing runs there that could use it"
    if service.head.ray_start_params.get("num-cpus") != "0":
        yield 'head: rayStartParams must have num-cpus: "0", or replicas run on it and are lost with it'


def names(service: RayService, _: Facts) -> Iterator[str]:
    """What is named has to exist, and once."""
    for group, spec in service.groups():
        pod = spec.template.spec
        volumes = [volume.name for volume in pod.volumes]
        yield from (f"{group}: volume {each!r} is given twice" for each in _twice(volumes))
        for container in (*pod.containers, *pod.init_containers):
            where = f"{group}: container {container.name}"
            for mount in container.volume_mounts:
                if mount.name not in volumes:
                    yield f"{where}: volumeMount {mount.name!r} has no volume"
            yield from (f"{where}: env {each} is given twice" for each in _twice([e.name for e in container.env]))
            yield from (f"{where}: port {each!r} is given twice" for each in _twice([p.name for p in container.ports]))


def environment(service: RayService, _: Facts) -> Iterator[str]:
    """Serve's parts on head and workers read the same variables, and must read the same."""
    shared = {group: _shared(spec.container) for group, spec in service.groups()}
    head = shared["head"]
    for group, own in shared.items():
        for variable in NEEDED:
            if variable not in own:
                yield f"{group}: env {variable} is missing"
            elif variable in SERVE_ENVIRONMENT and own[variable] != SERVE_ENVIRONMENT[variable]:
                yield f"{group}: env {variable} is {own[variable]!r}, `up` sets {SERVE_ENVIRONMENT[variable]!r}"
        for variable in sorted(head.keys() | own.keys()):
            if head.get(variable) != own.get(variable):
                here, there = own.get(variable), head.get(variable)
                yield f"{group}: env {variable} must be the same as on the head: {here} / {there}"


def keys(service: RayService, _: Facts) -> Iterator[str]:
    """A file of API keys comes from a Secret, mounted as a folder so that changes arrive."""
    for group, spec in service.groups():
        path = spec.container.value(API_KEYS_ENVIRONMENT)
        if path is None:
            continue
        folder = str(PurePosixPath(path).parent)
        mount = next((each for each in spec.container.volume_mounts if each.mount_path in (folder, path)), None)
        if mount is None:
            yield f"{group}: {API_KEYS_ENVIRONMENT} names {path}, but nothing is mounted at {folder}"
        elif mount.sub_path is not None:
            yield f"{group}: the API keys must not be mounted by subPath: a changed Secret would never arrive"
        elif not any(volume.name == mount.name and volume.secret for volume in spec.template.spec.volumes):
            yield f"{group}: the API keys must come from a Secret"


def security(service: RayService, _: Facts) -> Iterator[str]:
    """No root, nothing to write but volumes, no way up."""
    for group, spec in service.groups():
        pod = spec.template.spec
        who = pod.security_context
        if not who.run_as_non_root or (who.run_as_user, who.run_as_group) != _USER or who.seccomp_profile is None:
            yield f"{group}: securityContext must say runAsNonRoot, {_USER[0]}:{_USER[1]} and a seccompProfile"
        for container in (*pod.containers, *pod.init_containers):
            may = container.security_context
            if may.allow_privilege_escalation or not may.read_only_root_filesystem or may.capabilities.drop != ["ALL"]:
                yield (
                    f"{group}: container {container.name}: securityContext must have allowPrivilegeEscalation: false, "
                    "readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}"
                )
        if spec is not service.head and pod.automount_service_account_token:
            yield f"{group}: automountServiceAccountToken must be false: only the head's autoscaler needs one"


def leaving(service: RayService, _: Facts) -> Iterator[str]:
    """How a pod goes. Probes are the operator's: our own would replace them."""
    if service.head.template.metadata.annotations.get("cluster-autoscaler.kubernetes.io/safe-to-evict") != "false":
        yield 'head: needs the annotation cluster-autoscaler.kubernetes.io/safe-to-evict: "false"'
    for group, spec in service.groups():
        container = spec.container
        if container.liveness_probe or container.readiness_probe or container.startup_probe:
            yield f"{group}: leave the probes to the operator: it adds those that know Ray and Serve"
        hook = container.lifecycle.pre_stop
        if hook is not None and hook.exec is not None:
            what = "cuts open streams" if "ray stop" in " ".join(hook.exec.command) else "needs a shell"
            yield f"{group}: preStop must be the kubelet's own sleep; {' '.join(hook.exec.command)!r} {what}"
        if spec is not service.head and (hook is None or hook.sleep is None):
            yield f"{group}: needs lifecycle.preStop.sleep: endpoints forget a pod later than it gets SIGTERM"


def sleep_s(group: Group) -> int:
    """Seconds of the kubelet's sleep before SIGTERM."""
    hook = group.container.lifecycle.pre_stop
    return hook.sleep.seconds if hook is not None and hook.sleep is not None else 0


def _shared(container: Container) -> dict[str, str | None]:
    return {each.name: each.value for each in container.env if each.name.startswith(SHARED_PREFIXES)}


def _twice(all_names: list[str]) -> list[str]:
    return sorted({each for each in all_names if all_names.count(each) > 1})


RULES: Final[tuple[Rule, ...]] = (resources, names, environment, keys, security, leaving)
"""Each says what is wrong; nothing where all is well."""
