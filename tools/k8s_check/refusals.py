"""Values that the CRD takes and KubeRay 1.7 refuses, so that the RayService stays without pods.

After its ray-operator/controllers/ray/utils/validation.go; what else is there is a rule elsewhere (``kuberay``), or
waits for a feature gate that may be on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from k8s_check.facts import Facts
from k8s_check.ray_shapes import RayService

_TIMEOUT: Final = "ray.io/initializing-timeout"
_STORAGE: Final = "ray.io/external-storage-namespace"
_DURATION: Final = re.compile(r"^\+?((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))+$|^\+?\d+$")
"""Of Go, or whole seconds."""
_SIZES: Final = ("num-cpus", "num-gpus", "memory", "resources")


def metadata(service: RayService, _: Facts) -> Iterator[str]:
    """An annotation that has to be a time."""
    timeout = service.metadata.annotations.get(_TIMEOUT)
    if timeout and not (_DURATION.match(timeout) and re.search("[1-9]", timeout)):
        yield f"annotation {_TIMEOUT}: {timeout!r} must be a duration above 0, as 30m, or seconds"


def groups(service: RayService, _: Facts) -> Iterator[str]:
    """Numbers below 0, a group that is suspended, sizes in two places, a head service with a name of its own."""
    options = service.cluster.autoscaler_options
    if options.idle_timeout_seconds < 0:
        yield f"autoscalerOptions.idleTimeoutSeconds {options.idle_timeout_seconds} must not be below 0"
    for group in service.cluster.worker_group_specs:
        if group.suspend:
            yield f"{group.group_name}: suspend must not be set: the operator refuses it beside the autoscaler"
        for name, value in (
            ("idleTimeoutSeconds", group.idle_timeout_seconds),
            ("minReplicas", group.min_replicas),
            ("maxReplicas", group.max_replicas),
        ):
            if value is not None and value < 0:
                yield f"{group.group_name}: {name} {value} must not be below 0"
    for where, spec in service.groups():
        twice = [key for key in _SIZES if spec.ray_start_params.get(key)]
        if spec.resources and twice:
            yield f"{where}: resources and rayStartParams {', '.join(twice)} must not both be set"
    head_service = service.cluster.head_group_spec.head_service
    if head_service is not None and head_service.metadata.name:
        yield "head: headService.metadata.name must not be set: the operator gives it one"


def redis(service: RayService, _: Facts) -> Iterator[str]:
    """What ``gcsFaultToleranceOptions`` says, said elsewhere."""
    head = service.head
    if head.ray_start_params.get("redis-username") or _has(service, "REDIS_USERNAME"):
        yield "head: redis-username and REDIS_USERNAME must not be set: gcsFaultToleranceOptions.redisUsername"
    if service.cluster.gcs_fault_tolerance_options is None:
        if _has(service, "RAY_REDIS_ADDRESS") and "ray.io/ft-enabled" not in service.metadata.annotations:
            yield "head: env RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"
        return
    if head.ray_start_params.get("redis-password"):
        yield "head: rayStartParams redis-password must not stand beside gcsFaultToleranceOptions"
    if service.metadata.annotations.get(_STORAGE):
        yield f"annotation {_STORAGE} must not stand beside gcsFaultToleranceOptions"


def authentication(service: RayService, _: Facts) -> Iterator[str]:
    """Tokens are the operator's."""
    options = service.cluster.auth_options
    if options is not None and options.enable_k8s_token_auth:
        yield "authOptions.enableK8sTokenAuth must not be set: a RayService cannot have it"


def incremental(service: RayService, _: Facts) -> Iterator[str]:
    """The options of an incremental upgrade."""
    strategy = service.spec.upgrade_strategy
    options = strategy.cluster_upgrade_options
    if strategy.type != "NewClusterWithIncrementalUpgrade" or not options:
        return
    surge, step, interval = (options.get(each) for each in ("maxSurgePercent", "stepSizePercent", "intervalSeconds"))
    surge = 100 if surge is None else surge
    if not _within(surge, 0, 100):
        yield f"clusterUpgradeOptions.maxSurgePercent {surge} must be between 0 and 100"
    elif not _within(step, 0, surge):
        yield f"clusterUpgradeOptions.stepSizePercent {step} must be between 0 and maxSurgePercent {surge}"
    if not _within(interval, 1, None):
        yield f"clusterUpgradeOptions.intervalSeconds {interval} must be above 0"
    if not options.get("gatewayClassName"):
        yield "clusterUpgradeOptions.gatewayClassName is missing"


def _within(value: str | int | None, least: int, most: str | int | None) -> bool:
    return isinstance(value, int) and value >= least and (not isinstance(most, int) or value <= most)


def _has(service: RayService, variable: str) -> bool:
    return any(each.name == variable for each in service.head.container.env)


RULES: Final = (metadata, groups, redis, authentication, incremental)
"""Each says what is wrong; nothing where all is well."""
