"""Broken on purpose: what KubeRay refuses though the CRD takes it, what no pod can be made of, images and claims."""

from __future__ import annotations

from tests.k8s.breaking import CLUSTER, HEAD, HEAD_RAY, INCREMENTAL, POD, RAY, WORKERS, Case, both, env, put

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

HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"

NO_POD: dict[str, Case] = {
    "effect of a toleration": (
        "gpu", put(f"{POD}.tolerations.0.effect", "NoShedule"), "tolerations.0.effect: must be '', 'NoSchedule'"),
    "operator of a toleration": (
        "gpu", put(f"{POD}.tolerations.0.operator", "exists"), "tolerations.0.operator: must be '', 'Equal'"),
    "spread that is none": (
        "cpu", put(f"{POD}.topologySpreadConstraints.0.whenUnsatisfiable", "DoNotSchdule"),
        "whenUnsatisfiable: must be 'DoNotSchedule' or 'ScheduleAnyway'"),
    "size of a claim": (
        "gpu", put("spec.resources.requests.storage", "100GB", "PersistentVolumeClaim"),
        "PersistentVolumeClaim/orca-models: resources.requests.storage"),
    "size of Redis' claim": (
        "gpu+", put("spec.volumeClaimTemplates.0.spec.resources.requests.storage", "2GB", "StatefulSet/orca-redis"),
        "volumeClaimTemplates.0.spec.resources.requests.storage"),
    "HAProxy that the image does not have": (
        "cpu", both(env(RAY, HAPROXY, "/usr/bin/orca-haproxy"), env(HEAD_RAY, HAPROXY, "/usr/bin/orca-haproxy")),
        "is /usr/bin/orca-haproxy, the image has /usr/local/bin/orca-haproxy"),
    "two versions of one's own image": (
        "cpu", both(put(f"{HEAD_RAY}.image", "team/serving:1"), put(f"{RAY}.image", "team/serving:2")),
        "workers: image 'team/serving:2' must have the tag of the head's, 'team/serving:1'"),
    "two versions of ours": (
        "cpu", both(put(f"{HEAD_RAY}.image", "r/orca-serve:a"), put(f"{RAY}.image", "r:5000/orca-serve-cuda:b")),
        "workers: image 'r:5000/orca-serve-cuda:b' must have the tag of the head's"),
    "Redis of another namespace": (
        "gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", "orca-redis.default.svc:6379"),
        "the Service orca-redis that is here is in namespace orca"),
}  # fmt: skip
