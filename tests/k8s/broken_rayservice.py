"""Broken on purpose: what KubeRay refuses though the CRD takes it."""

from __future__ import annotations

from tests.k8s.breaking import CLUSTER, HEAD, HEAD_RAY, INCREMENTAL, WORKERS, Case, env, put

OPTIONS = {"gatewayClassName": "x", "stepSizePercent": 10, "intervalSeconds": 5}


def upgrade(**options: object) -> dict[str, object]:
    return {**INCREMENTAL, "clusterUpgradeOptions": {**OPTIONS, **options}}


REFUSED_BY_THE_OPERATOR: dict[str, Case] = {
    "group suspended": ("cpu", put(f"{WORKERS}.suspend", True), "workers: suspend must not be set"),
    "idle time-out below 0": (
        "cpu", put(f"{CLUSTER}.autoscalerOptions.idleTimeoutSeconds", -5), "idleTimeoutSeconds -5 must not be below 0"),
    "idle time-out of a group below 0": (
        "cpu", put(f"{WORKERS}.idleTimeoutSeconds", -5), "workers: idleTimeoutSeconds -5 must not be below 0"),
    "fewer workers than none": (
        "cpu", put(f"{WORKERS}.minReplicas", -1), "workers: minReplicas -1 must not be below 0"),
    "initializing time-out that is no time": (
        "cpu", put("metadata.annotations", {"ray.io/initializing-timeout": "soon"}),
        "initializing-timeout: 'soon' must be a duration"),
    "initializing time-out of nothing": (
        "cpu", put("metadata.annotations", {"ray.io/initializing-timeout": "0s"}), "'0s' must be a duration above 0"),
    "Redis user as a parameter": (
        "gpu+", put(f"{HEAD}.rayStartParams", {"num-cpus": "0", "redis-username": "x"}), "redis-username and REDIS"),
    "Redis user as a variable": ("gpu", env(HEAD_RAY, "REDIS_USERNAME", "x"), "REDIS_USERNAME must not be set"),
    "Redis password as a parameter": (
        "gpu+", put(f"{HEAD}.rayStartParams", {"num-cpus": "0", "redis-password": "x"}),
        "redis-password must not stand beside"),
    "Redis address as a variable": ("gpu", env(HEAD_RAY, "RAY_REDIS_ADDRESS", "r:6379"), "RAY_REDIS_ADDRESS needs gcs"),
    "storage as an annotation": (
        "gpu+", put("metadata.annotations", {"ray.io/external-storage-namespace": "x"}),
        "annotation ray.io/external-storage-namespace must not"),
    "head service with a name": (
        "cpu", put(f"{HEAD}.headService", {"metadata": {"name": "x"}, "spec": {}}),
        "headService.metadata.name must not be set"),
    "sizes of the head twice": (
        "cpu", put(f"{HEAD}.resources", {"CPU": "4"}), "head: resources and rayStartParams num-cpus must not both"),
    "tokens of Kubernetes": (
        "cpu", put(f"{CLUSTER}.authOptions.enableK8sTokenAuth", True), "enableK8sTokenAuth must not be set"),
    "incremental upgrade: step above surge": (
        "cpu", put("spec.upgradeStrategy", upgrade(stepSizePercent=50, maxSurgePercent=10)),
        "stepSizePercent 50 must be between 0 and maxSurgePercent 10"),
    "incremental upgrade: surge": (
        "cpu", put("spec.upgradeStrategy", upgrade(maxSurgePercent=101)), "maxSurgePercent 101 must be between"),
    "incremental upgrade: interval": (
        "cpu", put("spec.upgradeStrategy", upgrade(intervalSeconds=0)), "intervalSeconds 0 must be above 0"),
    "incremental upgrade: no gateway": (
        "cpu", put("spec.upgradeStrategy", upgrade(gatewayClassName="")), "gatewayClassName is missing"),
}  # fmt: skip
