"""The pods of head and workers: what they get, what they may do, and how they leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from deployment.haproxy import BINARY_VARIABLE
from k8s_check.facts import NEEDED, SERVE_ENVIRONMENT, SHARED_PREFIXES, Facts
from k8s_check.kuberay import Rule, is_our_image
from k8s_check.pod_shapes import PodSpec
from k8s_check.ray_shapes import Group, RayService
from k8s_check.shapes import Container, ContainerSecurity

SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_USER: Final = (1000, 100)
"""Of the image."""
_HAPROXY: Final = "/usr/local/bin/orca-haproxy"
"""In the image."""
_SECRET: Final = re.compile(
    r"(^|_)(PASSWORD|SECRET|SECRET_ACCESS_KEY|API_KEY|REDISCLI_AUTH|(ACCESS|API|AUTH|BEARER|GITHUB|HF|HUB|SECRET)_TOKEN)$"
)
"""Variables whose value is nobody else's business."""


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
            paths = [mount.mount_path for mount in container.volume_mounts]
            yield from (f"{where}: mountPath {each} is given twice" for each in _twice(paths))
            yield from (f"{where}: env {each} is given twice" for each in _twice([e.name for e in container.env]))
            yield from (
                f"{where}: port {each!r} is given twice" for each in _twice([p.name for p in container.ports if p.name])
            )


def environment(service: RayService, _: Facts) -> Iterator[str]:
    """Serve's parts on head and workers read the same variables, and must read the same."""
    shared = {group: _shared(spec.container) for group, spec in service.groups()}
    head = shared["head"]
    for group, spec in service.groups():
        own = shared[group]
        path = own.get(BINARY_VARIABLE, _HAPROXY)
        if is_our_image(spec.container.image) and path != _HAPROXY:
            yield f"{group}: env {BINARY_VARIABLE} is {path}, the image has {_HAPROXY}"
        for variable in NEEDED:
            if variable not in own:
                yield f"{group}: env {variable} is missing"
            elif variable in SERVE_ENVIRONMENT and own[variable] != SERVE_ENVIRONMENT[variable]:
                yield f"{group}: env {variable} is {own[variable]!r}, `up` sets {SERVE_ENVIRONMENT[variable]!r}"
        for variable in sorted(head.keys() | own.keys()):
            if head.get(variable) != own.get(variable):
                here, there = own.get(variable), head.get(variable)
                yield f"{group}: env {variable} must be the same as on the head: {here} / {there}"


def secrets(service: RayService, _: Facts) -> Iterator[str]:
    """No secret is written into a manifest; one that is mounted can be read."""
    for group, spec in service.groups():
        pod = spec.template.spec
        for container in (*pod.containers, *pod.init_containers):
            yield from (f"{group}: container {container.name}: {said}" for said in in_clear(container))
        for volume in pod.volumes:
            if volume.secret and not volume.secret.default_mode & 0o004 and pod.security_context.fs_group is None:
                mode = f"{volume.secret.default_mode:04o}"
                yield f"{group}: volume {volume.name!r}: without fsGroup nobody but root reads files of mode {mode}"
    options = service.cluster.gcs_fault_tolerance_options
    if options is not None and options.redis_password is not None and options.redis_password.value:
        yield "redisPassword.value is in clear: it belongs into a Secret (valueFrom.secretKeyRef)"


def security(service: RayService, _: Facts) -> Iterator[str]:
    """No root, nothing to write but volumes, no way up."""
    for group, spec in service.groups():
        pod = spec.template.spec
        who = pod.security_context
        whose = is_our_image(spec.container.image)  # other images have users of their own
        if not who.run_as_non_root or not _confined(pod) or (whose and (who.run_as_user, who.run_as_group) != _USER):
            yield f"{group}: securityContext must say runAsNonRoot, {_USER[0]}:{_USER[1]} and a seccompProfile"
        for container in (*pod.containers, *pod.init_containers):
            if container is not spec.container and not is_our_image(container.image):
                continue  # a sidecar has its own ways
            if _limited(container.security_context) and container.security_context.read_only_root_filesystem:
                continue
            yield (
                f"{group}: container {container.name}: securityContext must have allowPrivilegeEscalation: false, "
                "readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}"
            )
        if spec is not service.head and pod.automount_service_account_token:
            yield f"{group}: automountServiceAccountToken must be false: only the head's autoscaler needs one"
        if (
            spec is service.head
            and service.cluster.enable_in_tree_autoscaling
            and not pod.automount_service_account_token
        ):
            yield "head: automountServiceAccountToken must not be false: the autoscaler beside it asks for pods"
    if not _limited(service.cluster.autoscaler_options.security_context):
        yield "autoscalerOptions.securityContext must have allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}"


def leaving(service: RayService, _: Facts) -> Iterator[str]:
    """How a pod goes. Probes are the operator's: our own would replace them."""
    if service.head.template.metadata.annotations.get(SAFE_TO_EVICT) != "false":
        yield f'head: needs the annotation {SAFE_TO_EVICT}: "false"'
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
        elif hook is not None and hook.sleep is not None and hook.sleep.seconds < 1:
            yield f"{group}: lifecycle.preStop.sleep of {hook.sleep.seconds} s is none"


def sleep_s(group: Group) -> int:
    """Seconds of the kubelet's sleep before SIGTERM."""
    hook = group.container.lifecycle.pre_stop
    return hook.sleep.seconds if hook is not None and hook.sleep is not None else 0


def in_clear(container: Container) -> Iterator[str]:
    """Variables that hold a secret for everybody who may read the manifest."""
    for each in container.env:
        if _SECRET.search(each.name) and each.value and not each.value.startswith("$("):
            yield f"env {each.name} is in clear: it belongs into a Secret (valueFrom.secretKeyRef)"


def _shared(container: Container) -> dict[str, str | None]:
    return {
        each.name: each.value if each.value_from is None else str(each.value_from.secret_key_ref)
        for each in container.env if each.name.startswith(SHARED_PREFIXES)
    }  # fmt: skip


def _confined(pod: PodSpec) -> bool:
    profile = pod.security_context.seccomp_profile
    return profile is not None and profile.type != "Unconfined"


def _limited(may: ContainerSecurity) -> bool:
    return not (may.allow_privilege_escalation or may.privileged) and may.capabilities.drop == ["ALL"]


def _twice(all_names: list[str]) -> list[str]:
    return sorted({each for each in all_names if all_names.count(each) > 1})


RULES: Final[tuple[Rule, ...]] = (names, environment, secrets, security, leaving)
"""Each says what is wrong; nothing where all is well."""
