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

Rule = Callable[[RayService, Facts], Iterator[str]]


def name(service: RayService, _: Facts) -> Iterator[str]:
    """A DNS label, short enough."""
    own = service.metadata.name
    if len(own) > _MAX_NAME or not _NAME.match(own):
        yield f"metadata.name {own!r} must be a DNS label of at most {_MAX_NAME} characters ({len(own)} given)"


def versions(service: RayService, facts: Facts) -> Iterator[str]:
    """One Ray: of the constraints, of the cluster's spec and of every image."""
    if service.cluster.ray_version != facts.ray_version:
        yield f"rayVersion {service.cluster.ray_version!r} must be {facts.ray_version}, as in constraints.txt"
    for group, spec in service.groups():
        pod = spec.template.spec
        for container in (*pod.containers, *pod.init_containers):
            tag = container.image.rpartition("/")[2].partition("@")[0].partition(":")[2]
            if tag != facts.tag:
                yield f"{group}: image {container.image!r} must have the tag {facts.tag}"


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
    name, versions, autoscaler, replicas, upgrade, authentication, fault_tolerance,
)  # fmt: skip
"""Each says what is wrong; nothing where all is well."""
