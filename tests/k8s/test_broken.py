"""Manifests broken on purpose, each by one small change of a rendered overlay. The API server takes many of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import yaml

from k8s_check.checking import check_objects, check_text
from k8s_check.facts import Facts
from k8s_check.render import Object
from tests.k8s.breaking import (
    CLUSTER,
    HEAD,
    HEAD_RAY,
    INCREMENTAL,
    POD,
    RAY,
    WORKERS,
    Case,
    add,
    both,
    config,
    drop,
    env,
    holder,
    put,
    the,
)  # fmt: skip
from tests.k8s.broken_beside import BESIDE, REDIS_AND_MODELS
from tests.k8s.broken_pods import PODS, SERVE
from tests.k8s.broken_rayservice import NO_POD, REFUSED_BY_THE_OPERATOR
from tests.k8s.broken_ways import SECRETS, WAYS

# name of the case: (overlay, change, what must be said)
REFUSED_BY_THE_API_SERVER: dict[str, Case] = {
    "unknown field": (
        "cpu",
        put(f"{CLUSTER}.enableAutoscaling", True),
        "enableAutoscaling: unknown field; did you mean",
    ),
    "wrong type": (
        "cpu",
        put(f"{WORKERS}.maxReplicas", "4"),
        "workerGroupSpecs.0.maxReplicas: must be a valid integer",
    ),
    "missing required": ("cpu", drop(f"{WORKERS}.groupName"), "workerGroupSpecs.0.groupName: Field required"),
    "rayStartParams as int": ("cpu", put(f"{HEAD}.rayStartParams.num-cpus", 0), "num-cpus: must be a valid string"),
    "bad enum": ("cpu", put(f"{CLUSTER}.authOptions.mode", "basic"), "authOptions.mode: must be 'disabled' or 'token'"),
    "CEL rule": ("cpu", put("spec.managedBy", "somebody"), "spec.managedBy: must be 'ray.io/kuberay-operator' or"),
    "duplicate env": ("cpu", add(f"{RAY}.env", {"name": "HOME", "value": "/"}), "ray-worker: env HOME is given twice"),
    "bad quantity": ("cpu", put(f"{RAY}.resources.limits.memory", "4GB"), "limits.memory"),
    "bad label": ("cpu", put("metadata.labels", {"app": "-orca"}), "metadata.labels.app"),
    "probe typo": (
        "kind",
        put(f"{RAY}.readinessProbe", {"httpget": {}}),
        "httpget: unknown field; did you mean httpGet?",
    ),
    "port name too long": ("cpu", put(f"{RAY}.ports.1.name", "serve-over-the-net"), "ports.1.name"),
}
TAKEN_AND_FAILING_LATER: dict[str, Case] = {
    "min above max": ("cpu", put(f"{WORKERS}.minReplicas", 5), "workers: minReplicas 5 is above maxReplicas 4"),
    "replicas above max": ("cpu", put(f"{WORKERS}.replicas", 9), "workers: replicas 9 is not within"),
    "GPU request is not the limit": (
        "gpu", put(f"{RAY}.resources.requests", {"cpu": "6", "memory": "32Gi", "nvidia.com/gpu": "2"}),
        "workers: nvidia.com/gpu request 2 must equal its limit 1"),
    "memory request is not the limit": (
        "gpu", put(f"{RAY}.resources.requests.memory", "8Gi"), "workers: memory request 8Gi must equal its limit 32Gi"),
    "no memory limit": ("cpu", drop(f"{RAY}.resources.limits.memory"), "workers: needs a memory limit"),
    "idle time-out of a group without v2": (
        "cpu", both(put(f"{WORKERS}.idleTimeoutSeconds", 9), put(f"{CLUSTER}.autoscalerOptions.version", "v1")),
        "workers: idleTimeoutSeconds of a group needs autoscaler v2"),
    "autoscaler's version left out": (
        "cpu", drop(f"{CLUSTER}.autoscalerOptions.version"), "autoscalerOptions.version must be v2"),
    "restart policy": ("cpu", put(f"{POD}.restartPolicy", "Always"), "workers: restartPolicy must be Never"),
    "no serve port on the head": (
        "cpu", drop(f"{HEAD_RAY}.ports.5"), "head: needs a container port 8000 named 'serve'"),
    "no serve port on workers": (
        "cpu", drop(f"{RAY}.ports.1"), "workers: needs a container port 8000 named 'serve'"),
    "gRPC port not exposed": (
        "cpu", drop("spec.serveService.spec.ports.1"), "port 9000 of the Serve config is not exposed"),
    "service port of another name": (
        "cpu", put("spec.serveService.spec.ports.1.name", "grpc"), "port 'grpc' is dropped by the operator"),
    "service port the head lacks": (
        "cpu", put("spec.serveService.spec.ports.1.name", "serve-rpc"), "port 'serve-rpc' is dropped by the operator"),
    "service with an address": ("cpu", drop("spec.serveService.spec.clusterIP"), "serveService must be headless"),
    "gRPC without h2c": (
        "cpu", drop("spec.serveService.spec.ports.1.appProtocol"), "needs appProtocol: kubernetes.io/h2c"),
    "upgrade type": ("cpu", put("spec.upgradeStrategy.type", "Rolling"), "upgradeStrategy.type 'Rolling' is unknown"),
    "incremental upgrade without autoscaler": (
        "cpu", both(put("spec.upgradeStrategy", INCREMENTAL), put(f"{CLUSTER}.enableInTreeAutoscaling", False)),
        "NewClusterWithIncrementalUpgrade needs enableInTreeAutoscaling"),
    "incremental upgrade without options": (
        "cpu", put("spec.upgradeStrategy.type", INCREMENTAL["type"]), "needs clusterUpgradeOptions"),
    "upgrade strategy in the cluster's spec": (
        "cpu", put(f"{CLUSTER}.upgradeStrategy", {"type": "Recreate"}),
        "rayClusterConfig.upgradeStrategy must not be set"),
    "tokens on an old Ray": ("cpu", put(f"{CLUSTER}.rayVersion", "2.51.0"), "token needs Ray 2.52 or later"),
    "no tokens": ("cpu", drop(f"{CLUSTER}.authOptions"), "authOptions.mode must be token"),
    "another Ray than the image's": ("cpu", put(f"{CLUSTER}.rayVersion", "2.61.0"), "rayVersion '2.61.0' must be 2."),
    "another image": (
        "cpu", put(f"{RAY}.image", "r/orca-serve:0.0.9-ray2.1.0"), "workers: image 'r/orca-serve:0.0.9-ray"),
    "image not pinned": ("cpu", put(f"{HEAD_RAY}.image", "r:5000/orca-serve:latest"), "is not pinned"),
    "48 characters": ("cpu", put("metadata.name", "o" * 48), "must be a DNS label of at most 47 characters (48 given)"),
    "mount without a volume": (
        "cpu", add(f"{RAY}.volumeMounts", {"name": "data", "mountPath": "/d"}), "volumeMount 'data' has no volume"),
    "mount of a ConfigMap that is not there": (
        "gpu", both(put(f"{POD}.volumes.2.configMap.name",
        "orca-modl"), put("spec.template.spec.volumes.1.configMap.name",
        "orca-modl", "Job")), "no ConfigMap orca-modl; did you mean orca-model?"),
    "old annotation of fault tolerance": (
        "gpu+", put("metadata.annotations", {"ray.io/ft-enabled": "true"}),
        "annotation ray.io/ft-enabled must not stand"),
    "one storage for two clusters": (
        "gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.externalStorageNamespace", "x"),
        "externalStorageNamespace must not"),
    "reconnect time-out on the head": (
        "gpu+", env(HEAD_RAY, "RAY_gcs_rpc_server_reconnect_timeout_s", "9"),
        "RAY_gcs_rpc_server_reconnect_timeout_s must"),
    "head out of the service": (
        "cpu", put("spec.excludeHeadPodFromServeSvc", True), "excludeHeadPodFromServeSvc must stay off"),
    "work on the head": ("cpu", put(f"{HEAD}.rayStartParams", {}), 'head: rayStartParams must have num-cpus: "0"'),
    "GPU on the head": (
        "gpu", put(f"{HEAD_RAY}.resources", {"requests": {"nvidia.com/gpu": "1"},
                                             "limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}}),
        "head: must have no GPU"),
    "GPUs counted by hand": (
        "gpu", put(f"{WORKERS}.rayStartParams", {"num-gpus": "1"}), "must leave num-gpus to the limits"),
    "head may be evicted": ("cpu", drop(f"{HEAD}.template.metadata.annotations"), "safe-to-evict"),
    "own probe": (
        "cpu", put(f"{RAY}.readinessProbe", {"httpGet": {"path": "/", "port": 8000}}),
        "leave the probes to the operator"),
    "preStop ray stop": (
        "cpu", put(f"{RAY}.lifecycle.preStop", {"exec": {"command": ["ray", "stop"]}}), "'ray stop' cuts open streams"),
    "no preStop": ("cpu", drop(f"{RAY}.lifecycle"), "workers: needs lifecycle.preStop.sleep"),
    "drain does not fit into grace": (
        "cpu", put(f"{POD}.terminationGracePeriodSeconds", 345),
        "preStop 10 s + drain 330 s + 20 s to end do not fit into a grace period of 345 s"),
    "drain with a unit": (
        "cpu", env(RAY, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "330s"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S '330s' must be a number of seconds"),
    "grace beyond the cluster autoscaler's": (
        "cpu", put(f"{POD}.terminationGracePeriodSeconds", 1200), "the cluster autoscaler gives a pod 600 s"),
    "no drain": ("cpu", env(RAY, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0"), "must be above 0, or SIGTERM cuts"),
    "drain left to Ray": (
        "cpu", env(RAY, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", None),
        "30 must be above Serve's graceful shutdown of 300"),
    "Serve's shutdown above Ray's drain": (
        "cpu", config("timeout_s: 300", "timeout_s: 400"), "330 must be above Serve's graceful shutdown of 400 s"),
    "drain below the longest request": (
        "cpu", config("timeout_s: 300", "timeout_s: 60"),
        "drain.timeout_s 60 must be at least limits.max_request_seconds"),
    "old cluster goes too soon": (
        "cpu", put("spec.rayClusterDeletionDelaySeconds", 300), "rayClusterDeletionDelaySeconds 300 must be above"),
    "HAProxy stops too soon": (
        "cpu", both(env(RAY, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "300"),
                    env(HEAD_RAY, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "300")),
        "HARD_STOP_AFTER_S 300 cuts requests of 300 s"),
    "variable on the head only": (
        "cpu", env(RAY, "RAY_SERVE_ENABLE_HA_PROXY", None), "workers: env RAY_SERVE_ENABLE_HA_PROXY is missing"),
    "variable that differs": (
        "gpu", env(RAY, "HF_HUB_OFFLINE", "0"), "workers: env HF_HUB_OFFLINE must be the same as on the head: 0 / 1"),
    "another value than up's": (
        "cpu", env(HEAD_RAY, "RAY_SERVE_HAPROXY_RETRY_ON", "none"), "RAY_SERVE_HAPROXY_RETRY_ON is 'none', `up` sets"),
    "keys by subPath": (
        "gpu", lambda objects: [mount.update(subPath="api-keys") for mount in
                                holder(the(objects, "RayService"), f"{RAY}.volumeMounts")[0]["volumeMounts"]] and None,
        "must not be mounted by subPath"),
    "keys nowhere": ("cpu", env(RAY, "ORCA_API_KEYS_FILE", "/k/f"), "names /k/f, but nothing is mounted at /k"),
    "as root": ("cpu", put(f"{POD}.securityContext.runAsUser", 0), "workers: securityContext must say runAsNonRoot"),
    "root to write": (
        "cpu", put(f"{HEAD_RAY}.securityContext.readOnlyRootFilesystem", False), "readOnlyRootFilesystem: true"),
    "Serve config: unknown key": (
        "cpu", config("max_batch_size", "max_bach_size"), "did you mean engine.max_batch_size?"),
    "Serve config: unknown key of Serve": (
        "cpu", config("http_options:", "http_option:"), "http_option: unknown key; did you mean http_options?"),
    "Serve config: bad YAML": ("cpu", config("proxy_location: ", "proxy_location: ["), "config: is not valid YAML"),
    "Serve config: loopback": ("cpu", config("host: 0.0.0.0", "host: 127.0.0.1"), "127.0.0.1 is loopback"),
    "Serve config: other port": (
        "cpu", config("port: 8000", "port: 8001"), "port 'serve' is 8000, the Serve config says 8001"),
    "Serve config: proxies on the head": (
        "cpu", config("EveryNode", "HeadOnly"), "proxy_location HeadOnly leaves workers NotReady"),
    "Serve config: no gRPC service": (
        "cpu", config("    - deployment.grpc_api.add_orca_service\n", ""), "grpc_servicer_functions: must list"),
    "Serve config: more replicas than workers": (
        "gpu", config("max: 8", "max: 9"), "maxReplicas of the workers hold 8 replicas, serveConfigV2 wants 9"),
    "Serve config: replica larger than a worker": ("cpu", config("num_cpus: 2", "num_cpus: 4"), "hold 0 replicas"),
    "Serve config: GPUs nobody has": (
        "cpu", both(config("device: cpu", "device: cuda"), config("num_gpus: 0", "num_gpus: 1")), "hold 0 replicas"),
    "Serve config: ingress on the head": (
        "cpu", config("num_cpus: 0.5", "num_cpus: 0"), "ingress.num_cpus must be above 0"),
    "copy of the Serve config differs": (
        "gpu", lambda objects: [each["data"].update({"serve-config.yaml": "x"}) for each in objects
                                if each["metadata"]["name"] == "orca-model"] and None,
        "ConfigMap/orca-model: serve-config.yaml differs"),
    "budget as maxUnavailable": (
        "cpu", both(drop("spec.minAvailable", "PodDisruptionBudget"), put("spec.maxUnavailable", 1,
        "PodDisruptionBudget")),
        "PodDisruptionBudget/orca-workers: needs an integer minAvailable"),
    "budget in percent": (
        "cpu", put("spec.minAvailable", "50%", "PodDisruptionBudget"), "needs an integer minAvailable"),
    "budget that allows nothing": (
        "cpu", put("spec.minAvailable", 2, "PodDisruptionBudget"), "minAvailable 2 allows no eviction"),
    "budget on the head": (
        "cpu", put("spec.selector.matchLabels", {"app.kubernetes.io/name": "orca-serve"}, "PodDisruptionBudget"),
        "must not select the head"),
    "policy without the cluster itself": (
        "gpu", drop("spec.ingress.0", "NetworkPolicy"), "must let the pods of the cluster reach each other"),
    "policy without gRPC": ("gpu", drop("spec.ingress.3.ports.1", "NetworkPolicy"), "lets nobody reach port 9000"),
    "metrics port of another name": (
        "gpu", put("spec.podMetricsEndpoints.0.port", "prom", "PodMonitor"), "port 'prom' is declared by no container"),
    "metric that is not there": (
        "gpu", put("spec.groups.0.rules.0.expr", "ray_orca_slot_total == 0", "PrometheusRule"), "ray_orca_slot_total"),
    "route to another service": (
        "gpu+", put("spec.rules.0.backendRefs.0.port", 9001, "GRPCRoute"),
        "GRPCRoute/orca: backend orca-serve-svc:9001"),
    "route that ends streams": (
        "gpu+", put("spec.rules.0.timeouts.request", "1m30s", "HTTPRoute"),
        "HTTPRoute/orca: timeouts.request 1m30s cuts streams: limits.max_request_seconds is 300"),
    "job with another image": (
        "gpu", put("spec.template.spec.containers.0.image", "r/orca-serve:0.0.1", "Job"), "must be the service's own"),
    "two namespaces": (
        "cpu", put("metadata.namespace", "other", "PodDisruptionBudget"), "several namespaces: orca, other"),
}  # fmt: skip
CASES = {
    **REFUSED_BY_THE_API_SERVER, **TAKEN_AND_FAILING_LATER, **REFUSED_BY_THE_OPERATOR, **PODS, **SERVE, **WAYS,
    **NO_POD, **SECRETS, **BESIDE, **REDIS_AND_MODELS,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_named(name: str, rendered: Callable[[str], list[Object]], facts: Facts) -> None:
    overlay, change, said = CASES[name]
    objects = copy.deepcopy(rendered(overlay))
    change(objects)
    problems = check_objects(objects, facts)
    assert any(said in problem for problem in problems), "\n".join(problems) or "nothing was found"


def test_a_key_given_twice(rendered: Callable[[str], list[Object]], facts: Facts) -> None:
    text = yaml.safe_dump(the(rendered("cpu"), "RayService"))
    (problem,) = check_text(text.replace("    rayVersion:", "    rayVersion: 2.1.0\n    rayVersion:"), facts)
    assert "key 'rayVersion' is given twice" in problem


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "not valid YAML"), ("a: 1", "no kind"), ("", "one RayService, there are 0")]
)
def test_what_is_no_manifest(text: str, said: str, facts: Facts) -> None:
    (problem,) = check_text(text, facts)
    assert said in problem
