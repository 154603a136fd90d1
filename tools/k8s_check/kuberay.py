"""What KubeRay 1.7 refuses only when it runs, or takes and silently does something else with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from k8s_check.facts import Facts
from k8s_check.ray_shapes import RayService

_NAME: Final = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_MAX_NAME: Final = 47
"""Of a RayService: what the operator appends must fit into a label."""
_TOKENS_SINCE: Final = (2, 52)
_UPGRADES: Final = (None, "NewCluster", "NewClusterWithIncrementalUpgrade", "None")
_FT_VARIABLES: Final = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_gcs_rpc_server_reconnect_timeout_s")

_RAY_OF_IMAGE: Final = re.compile(r"-ray(\d+\.\d+\.\d+)")
_PORTS: Final = {
    "dashboard": ("dashboard-port", 8265), "gcs-server": ("port", 6379), "metrics": ("metrics-export-port", 8080),
}  # fmt: skip
"""Ports that are known by name: the parameter that moves them, and where the operator or Ray puts them without."""
PARAMETERS: Final = frozenset(
    {
        "address", "autoscaling-config", "block", "cgroup-path", "dashboard-agent-grpc-port",
        "dashboard-agent-listen-port", "dashboard-host", "dashboard-port", "disable-usage-stats",
        "enable-object-reconstruction", "enable-resource-isolation", "head", "include-dashboard", "include-log-monitor",
        "labels", "labels-file", "log-color", "log-style", "max-worker-port", "memory", "metrics-export-port",
        "min-worker-port", "no-monitor", "no-redirect-output", "node-ip-address", "node-manager-port", "node-name",
        "num-cpus", "num-gpus", "object-manager-port", "object-spilling-directory", "object-store-memory",
        "plasma-directory", "port", "proxy-server-url", "ray-client-server-port", "ray-debugger-external",
        "redis-password", "redis-shard-ports", "redis-username", "resources", "runtime-env-agent-port", "system-config",
        "system-reserved-cpu", "system-reserved-memory", "temp-dir", "tracing-startup-hook", "verbose",
        "worker-port-list",
    }
)  # fmt: skip
"""Of `ray start`."""

Rule = Callable[[RayService, Facts], Iterator[str]]


def name(service: RayService, _: Facts) -> Iterator[str]:
    """A DNS label, short enough."""
    own = service.metadata.name
    if len(own) > _MAX_NAME or not _NAME.match(own):
        yield f"metadata.name {own!r} must be a DNS label of at most {_MAX_NAME} characters ({len(own)} given)"


def versions(service: RayService, facts: Facts) -> Iterator[str]:
    """One Ray: of the constraints, of the cluster's spec and of every image that names one; and images that stay."""
    if service.cluster.ray_version != facts.ray_version:
        yield f"rayVersion {service.cluster.ray_version!r} must be {facts.ray_version}, as in constraints.txt"
    ours = [spec.container.image for _, spec in service.groups()]
    for group, spec in service.groups():
        pod = spec.template.spec
        for container in (*pod.containers, *pod.init_containers):
            image = f"{group}: image {container.image!r}"
            tag, named = tag_of(container.image), _RAY_OF_IMAGE.search(tag_of(container.image))
            if tag in ("", "latest"):
                yield f"{image} is not pinned"
            elif named is not None and named[1] != facts.ray_version:
                yield f"{image} has Ray {named[1]}, constraints.txt {facts.ray_version}"
            elif is_our_image(container.image) and tag not in [tag_of(each) for each in ours]:
                yield f"{image} must be the service's own, {ours[-1]!r}"
            elif container.image == f"orca-serve:{facts.version}":
                yield f"{image} is the name of k8s/base: `images:` must say which it is, where no other one says it"


def one_image(service: RayService, _: Facts) -> Iterator[str]:
    """Head and workers run one version; the name may differ (ours for CPUs and for CUDA), and so may digests then."""
    head = service.head.container.image
    for group in service.cluster.worker_group_specs:
        image = group.container.image
        same = name_of(image) == name_of(head)
        if (same or (is_our_image(image) and is_our_image(head) and "@" not in image + head)) and (
            tag_of(image) != tag_of(head)
        ):
            yield f"{group.group_name}: image {image!r} must have the tag of the head's, {head!r}"


def name_of(image: str) -> str:
    """What comes before a tag or digest."""
    name = image.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def tag_of(image: str) -> str:
    """What comes after the name: a tag, or a digest where there is one."""
    name, _, digest = image.partition("@")
    return digest or name.rpartition("/")[2].partition(":")[2]


def is_our_image(image: str) -> bool:
    """Whether an image has a name that `make image` gives, in any registry."""
    return image.rpartition("/")[2].partition("@")[0].partition(":")[0] in ("orca-serve", "orca-serve-cuda")


def groups(service: RayService, _: Facts) -> Iterator[str]:
    """Names of worker groups become labels and parts of pods' names."""
    names = [group.group_name for group in service.cluster.worker_group_specs]
    for each in dict.fromkeys(names):
        if names.count(each) > 1:
            yield f"groupName {each!r} is given twice"
        if not _NAME.match(each) or each == "headgroup":
            yield f"groupName {each!r} must be a DNS label, and not the head's"


def start(service: RayService, _: Facts) -> Iterator[str]:
    """What `ray start` takes, and ports under which the operator looks for what is started."""
    for group, spec in service.groups():
        given = spec.ray_start_params
        for key in sorted(given.keys() - PARAMETERS):
            yield f"{group}: rayStartParams: ray start knows no --{key}"
        if "labels" in given:
            yield f"{group}: rayStartParams: the operator refuses labels: the group's own field has them"
        for name, (key, default) in _PORTS.items():
            declared, moved = spec.container.port(name), given.get(key, "")
            real = int(moved) if moved.isdigit() else default
            if declared is None and name == "dashboard" and spec is service.head:
                yield f"head: needs a container port {real} named 'dashboard': the operator asks there"
            elif declared is not None and declared != real:
                yield f"{group}: port {name!r} is {declared}, Ray's is {real} (rayStartParams {key})"
        if spec is service.head and given.get("dashboard-host", "0.0.0.0") in ("127.0.0.1", "localhost", "::1"):  # noqa: S104
            yield f"head: rayStartParams dashboard-host {given['dashboard-host']}: the operator would not reach it"


def autoscaler(service: RayService, _: Facts) -> Iterator[str]:
    """Version 2, said where the operator looks for it."""
    cluster = service.cluster
    if not cluster.enable_in_tree_autoscaling:
        yield "enableInTreeAutoscaling must be true: replicas that Serve wants would wait for workers for ever"
    is_v2 = cluster.autoscaler_options.version == "v2"
    if not is_v2:
        yield "autoscalerOptions.version must be v2, stated: the operator does not follow Ray's default"
    for group, spec in service.groups():
        if spec.container.value("RAY_enable_autoscaler_v2") is not None:
            yield f"{group}: RAY_enable_autoscaler_v2 and autoscalerOptions.version must not both be set"
        if spec.template.spec.restart_policy not in (None, "Never"):
            yield f"{group}: restartPolicy must be Never or unset with autoscaler v2"
    for workers in cluster.worker_group_specs:
        if workers.idle_timeout_seconds is not None and not is_v2:
            yield f"{workers.group_name}: idleTimeoutSeconds of a group needs autoscaler v2"


def replicas(service: RayService, _: Facts) -> Iterator[str]:
    """The bounds of a group, in order."""
    for group in service.cluster.worker_group_specs:
        if group.min_replicas > group.max_replicas:
            yield f"{group.group_name}: minReplicas {group.min_replicas} is above maxReplicas {group.max_replicas}"
        elif group.replicas is not None and not group.min_replicas <= group.replicas <= group.max_replicas:
            yield (
                f"{group.group_name}: replicas {group.replicas} is not within minReplicas {group.min_replicas} and "
                f"maxReplicas {group.max_replicas}"
            )


def upgrade(service: RayService, _: Facts) -> Iterator[str]:
    """The types that the operator knows; where they belong; what they need."""
    strategy = service.spec.upgrade_strategy
    if strategy.type not in _UPGRADES:
        yield f"upgradeStrategy.type {strategy.type!r} is unknown to the operator, though the CRD takes it"
    if service.cluster.upgrade_strategy is not None:
        yield "rayClusterConfig.upgradeStrategy must not be set in a RayService: use spec.upgradeStrategy"
    if strategy.type == "NewClusterWithIncrementalUpgrade":
        if not service.cluster.enable_in_tree_autoscaling:
            yield "upgradeStrategy NewClusterWithIncrementalUpgrade needs enableInTreeAutoscaling"
        if not strategy.cluster_upgrade_options:
            yield "upgradeStrategy NewClusterWithIncrementalUpgrade needs clusterUpgradeOptions"
    if service.spec.exclude_head_pod_from_serve_svc and strategy.type in (None, "NewCluster"):
        yield (
            "excludeHeadPodFromServeSvc must stay off: traffic is switched before the new workers are Ready, seconds "
            "without an endpoint"
        )


def authentication(service: RayService, facts: Facts) -> Iterator[str]:
    """Tokens on, with a Ray that has them."""
    options = service.cluster.auth_options
    if options is None or options.mode != "token":
        yield "authOptions.mode must be token: who reaches the dashboard can run code"
        return
    version = tuple(int(part) for part in re.findall(r"\d+", service.cluster.ray_version or facts.ray_version)[:2])
    if version < _TOKENS_SINCE:
        yield f"authOptions.mode token needs Ray 2.52 or later, rayVersion is {service.cluster.ray_version}"


def fault_tolerance(service: RayService, _: Facts) -> Iterator[str]:
    """The head's state: said in one place only."""
    options = service.cluster.gcs_fault_tolerance_options
    if options is None:
        return
    if "ray.io/ft-enabled" in service.metadata.annotations:
        yield "annotation ray.io/ft-enabled must not stand beside gcsFaultToleranceOptions"
    if options.external_storage_namespace is not None:
        yield "gcsFaultToleranceOptions.externalStorageNamespace must not be set: clusters of an upgrade would share it"
    for group, spec in service.groups():
        for variable in _FT_VARIABLES:
            if any(each.name == variable for each in spec.container.env):
                yield f"{group}: env {variable} must not stand beside gcsFaultToleranceOptions"


RULES: Final[tuple[Rule, ...]] = (
    name, versions, one_image, groups, start, autoscaler, replicas, upgrade, authentication, fault_tolerance,
)  # fmt: skip
"""Each says what is wrong; nothing where all is well."""
