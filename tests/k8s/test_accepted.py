"""What another operator may rightly do, and the check must let pass."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from k8s_check import fields
from k8s_check.checking import check_objects
from k8s_check.facts import Facts
from k8s_check.kuberay import PARAMETERS
from k8s_check.quantities import number
from k8s_check.render import Object
from tests.k8s.breaking import (
    CLUSTER,
    HEAD,
    HEAD_POD,
    HEAD_RAY,
    POD,
    RAY,
    WORKERS,
    Change,
    add,
    both,
    config,
    env,
    put,
    the,
)  # fmt: skip
from tests.k8s.broken_ways import secret

AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
    {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}]}}}  # fmt: skip
CREATED = {"matchLabels": {"app.kubernetes.io/created-by": "kuberay-operator"}}
POD_NAME = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
SIDECAR = {
    "name": "log",
    "image": "r/log:1",
    "securityContext": {"privileged": False},
    "ports": [{"containerPort": 99}],
}
DENY = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny",
        "namespace": "orca"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}  # fmt: skip


def another(each: Object) -> Change:
    return lambda objects: objects.append(copy.deepcopy(each))


def beside(kind: str, api: str, spec: dict[str, object], namespace: str = "orca") -> Change:
    return another(
        {"apiVersion": api, "kind": kind, "metadata": {"name": "theirs", "namespace": namespace}, "spec": spec}
    )


def pulled_from(image: str) -> Change:
    """The image of our pods, wherever it stands."""

    def change(objects: list[Object]) -> None:
        cluster = the(objects, "RayService")["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            group["template"]["spec"]["containers"][0]["image"] = image

    return change


def with_a_group_for_ingresses(objects: list[Object]) -> None:
    """CPUs alone, no weights: where the GPU workers may all go, these keep the doors."""
    groups = the(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    groups[0].update(minReplicas=0)
    group = copy.deepcopy(groups[0])
    group.update(groupName="ingresses", replicas=2, minReplicas=2, maxReplicas=2)
    pod = group["template"]["spec"]
    del pod["initContainers"], pod["tolerations"]
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] in ("tmp", "api-keys")]
    (container,) = pod["containers"]
    container["resources"] = {"limits": {"cpu": "2", "memory": "4Gi"}}
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] in ("tmp", "api-keys")]
    groups.append(group)
    config("min: 2", "min: 0")(objects)
    selector = "{name: Ingress, ray_actor_options: {label_selector: {ray.io/node-group: ingresses}}}"
    config("    args:", f"    deployments: [{selector}]\n    args:")(objects)
    put("spec.groups.0.rules.0.expr", "absent(ray_orca_load_report_age_seconds)", "PrometheusRule")(objects)


ACCEPTED: dict[str, tuple[str, Change]] = {
    "imagePullSecrets": ("cpu", put(f"{POD}.imagePullSecrets", [{"name": "regcred"}])),
    "runtimeClassName": ("gpu", put(f"{POD}.runtimeClassName", "nvidia")),
    "affinity": ("gpu", put(f"{POD}.affinity", AFFINITY)),
    "envFrom": ("cpu", put(f"{RAY}.envFrom", [{"secretRef": {"name": "proxy"}}])),
    "fieldRef": ("cpu", add(f"{RAY}.env", POD_NAME)),
    "csi": ("gpu", add(f"{POD}.volumes", {"name": "b", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}})),
    "dnsConfig": ("cpu", put(f"{HEAD_POD}.dnsConfig", {"options": [{"name": "ndots", "value": "1"}]})),
    "initializing time-out": (
        "cpu", put("metadata.annotations", {"ray.io/initializing-timeout": "1h30m"})),
    "initializing time-out in seconds": (
        "cpu", put("metadata.annotations", {"ray.io/initializing-timeout": "3600"})),
    "headService": ("cpu", put(f"{HEAD}.headService", {"metadata": {"annotations": {"a": "b"}}, "spec": {}})),
    "Redis user": ("gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.redisUsername", {"value": "ray"})),
    "Redis elsewhere": ("gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", "rediss://r.example.net:6380")),
    "Redis of a like name elsewhere": (
        "gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", "orca-redis.example.net:6379")),
    "Redis by its whole name": (
        "gpu+", put(f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress", "orca-redis.orca.svc.cluster.local:6379")),
    "images of CPUs and CUDA": ("cpu", put(f"{HEAD_RAY}.image", "r.example.net:5000/orca-serve-cuda:0.1.0-ray2.60.0")),
    "HAProxy of an image of one's own": (
        "cpu", both(pulled_from("r.example.net/serving:1"), *(env(each, "RAY_SERVE_HAPROXY_BINARY_PATH", "/opt/haproxy")
                                                              for each in (HEAD_RAY, RAY)))),
    "priority of a group": ("cpu", put(f"{WORKERS}.priority", 5)),
    "toleration": ("gpu", put(f"{POD}.tolerations", [{"operator": "Exists"}])),
    "ConfigMap made elsewhere": ("cpu", add(f"{POD}.volumes", {"name": "ca", "configMap": {"name": "company-ca"}})),
    "sidecar": ("cpu", add(f"{POD}.containers", SIDECAR)),
    "grace that the cluster autoscaler does not end": (
        "cpu", both(put(f"{POD}.terminationGracePeriodSeconds", 3600), put(f"{WORKERS}.template.metadata.annotations",
                    {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}))),
    "own image": ("cpu", pulled_from("registry.example.net/team/serving:2026-11")),
    "digest": ("cpu", pulled_from(f"registry.example.net/orca-serve@sha256:{'0' * 64}")),
    "no requests": ("gpu", put(f"{RAY}.resources", {"limits": {"cpu": "6", "memory": "32Gi", "nvidia.com/gpu": 1}})),
    "3k CPUs": ("cpu", put(f"{RAY}.resources.limits.cpu", "3k")),
    "memory in other units": ("gpu", put(f"{RAY}.resources.requests.memory", "32768Mi")),
    "secret by reference": ("cpu", both(env(HEAD_RAY, "HF_TOKEN", "$(TOKEN)"), env(RAY, "HF_TOKEN", "$(TOKEN)"))),
    "budget by Ray's labels": (
        "cpu", put("spec.selector.matchLabels", {"ray.io/group": "workers"}, "PodDisruptionBudget")),
    "from zero": ("cpu", both(put(f"{WORKERS}.minReplicas", 0), config("min: 2", "min: 0"))),
    "autoscaler brings the second": (
        "gpu+", both(put(f"{WORKERS}.minReplicas", 1), lambda objects: objects.remove(the(objects,
        "PodDisruptionBudget")))),
    "limits of Serve above ours": ("cpu", config("  port: 8000", "  port: 8000\n  request_timeout_s: 301")),
    "override of what is Serve's own": (
        "cpu", config("    args:", "    deployments: [{name: Replica, health_check_period_s: 5}]\n    args:")),
    "ingresses beside replicas that are spread": (
        "cpu", both(config("num_cpus: 2", "num_cpus: 1"), config("replicas: 2\n        num_cpus: 0.5",
                                                                 "replicas: 4\n        num_cpus: 2"))),
    "token that is no secret": ("cpu", both(env(HEAD_RAY, "EOS_TOKEN", "</s>"), env(RAY, "EOS_TOKEN", "</s>"))),
    "own image with a model and a user": (
        "cpu", both(pulled_from("r.example.net/serving:1"), config("source: smollm2-135m-instruct", "source: /opt/m"),
                    put(f"{POD}.securityContext.runAsUser", 2000))),
    "two monitors": (
        "gpu", both(put("spec.selector.matchLabels", {"ray.io/node-type": "head"}, "PodMonitor"),
                    beside("PodMonitor", "monitoring.coreos.com/v1",
                           {"selector": {"matchLabels": {"ray.io/node-type": "worker"}},
                            "podMetricsEndpoints": [{"portNumber": 8080}]}))),
    "route to a service of a like name": (
        "gpu+", beside("HTTPRoute", "gateway.networking.k8s.io/v1",
                       {"parentRefs": [{"name": "orca"}],
                        "rules": [{"backendRefs": [{"name": "orca-ui", "port": 80}]}]})),
    "half a CPU as a number": ("cpu", put(f"{CLUSTER}.autoscalerOptions.resources.limits.cpu", 0.5)),
    "a kind of the same name": (
        "gpu", both(beside("NetworkPolicy", "projectcalico.org/v3", {"selector": "all()"}),
                    beside("Gateway", "networking.istio.io/v1", {"servers": []}),
                    beside("Service", "serving.knative.dev/v1", {"template": {"spec": {}}}),
                    beside("Job", "batch.volcano.sh/v1alpha1", {"tasks": []}))),
    "a group for ingresses": ("gpu", with_a_group_for_ingresses),
    "egress to the cluster and DNS": (
        "gpu", both(put("spec.policyTypes", ["Ingress", "Egress"], "NetworkPolicy"),
                    put("spec.egress", [{"to": [{"podSelector": {}}]}, {"ports": [{"protocol": "UDP", "port": 53}]}],
                        "NetworkPolicy"))),
    "clients of all namespaces": (
        "gpu", put("spec.ingress.3.from", [{"namespaceSelector": {}}], "NetworkPolicy")),
    "operator under a name of one's own": (
        "gpu", put("spec.ingress.1.from.0.podSelector.matchLabels", {"app.kubernetes.io/name": "our-kuberay-operator"},
                   "NetworkPolicy")),
    "operator by its release": (
        "gpu", put("spec.ingress.1.from.0.podSelector.matchLabels", {"app.kubernetes.io/instance": "kuberay"},
                   "NetworkPolicy")),
    "all pods of Ray": ("gpu", add("spec.ingress", {"from": [{"podSelector": CREATED}]}, "NetworkPolicy")),
    "services and ingress to Serve": (
        "cpu", both(beside("Service", "v1", {"type": "LoadBalancer", "selector": {"ray.io/node-type": "head"},
                                             "ports": [{"port": 80, "targetPort": 8000}]}),
                    beside("Ingress", "networking.k8s.io/v1",
                           {"defaultBackend": {"service": {"name": "orca-serve-svc", "port": {"number": 8000}}}}))),
    "Secrets beside": (
        "gpu+", both(secret("orca-redis", "password"), secret("orca-api-keys", "api-keys"),
                     beside("SealedSecret", "bitnami.com/v1alpha1", {"encryptedData": {}}, "db"))),
    "keys under another name in the Secret": (
        "gpu", both(*(put(f"{pod}.secret.items", [{"key": "production", "path": "api-keys"}])
                      for pod in (f"{HEAD_POD}.volumes.1", f"{POD}.volumes.3")))),
    "policies that add up": ("gpu", another(DENY)),
    "policy for the cluster's namespace": (
        "gpu", put("spec.ingress.0.from.0",
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "orca"}}},
                   "NetworkPolicy")),
    "range of ports": ("gpu", put("spec.ingress.2.ports", [{"port": 8080, "endPort": 50000}], "NetworkPolicy")),
    "policy without monitoring": ("gpu", lambda objects: objects.remove(the(objects, "PodMonitor"))),
    "somebody else's monitor": (
        "gpu", beside("PodMonitor", "monitoring.coreos.com/v1",
                      {"selector": {"matchLabels": {"app": "db"}}, "podMetricsEndpoints": [{"port": "prom"}]})),
    "somebody else's budget": (
        "gpu", beside("PodDisruptionBudget", "policy/v1",
                      {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "db"}}}, "db")),
    "somebody else's route": (
        "gpu+", beside("HTTPRoute", "gateway.networking.k8s.io/v1",
                       {"parentRefs": [{"name": "x"}], "rules": [{"backendRefs": [{"name": "grafana", "port": 80}]}]})),
    "gateway of another namespace": (
        "gpu+", put("spec.parentRefs", [{"name": "shared", "namespace": "gateways"}], "HTTPRoute")),
    "labels of the cluster": (
        "gpu", put("spec.groups.0.rules.0.expr", 'absent(ray_orca_slots_total{cluster="a", region="b"})',
        "PrometheusRule")),
    "recording rule": (
        "gpu", put("spec.groups.0.rules.0", {"record": "ray_orca_busy", "expr": "ray_orca_slots_used"},
        "PrometheusRule")),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_right_passes(name: str, rendered: Callable[[str], list[Object]], facts: Facts) -> None:
    overlay, change = ACCEPTED[name]
    objects = copy.deepcopy(rendered(overlay))
    change(objects)
    assert check_objects(objects, facts) == []


@pytest.mark.parametrize(
    ("quantity", "worth"),
    [("500m", 0.5), ("3k", 3000), ("4Gi", 4 * 1024**3), ("4G", 4e9), (2, 2), ("1e3", 1000), (".5", 0.5), (None, 0)],
)
def test_quantities(quantity: str | int | None, worth: float) -> None:
    assert number(quantity) == pytest.approx(worth)


def test_what_is_no_quantity() -> None:
    with pytest.raises(ValueError, match="4GB"):
        number("4GB")


def test_every_type_of_the_list_is_in_it() -> None:
    types = fields.known()
    named = {of.strip("[]") for parts in types.values() for of in parts.values()} - {""}
    assert named <= types.keys()
    assert {"affinity", "imagePullSecrets", "runtimeClassName"} <= types["PodSpec"].keys()


def test_parameters_are_those_of_ray() -> None:
    start = pytest.importorskip("ray.scripts.scripts").start
    options = {name.removeprefix("--") for each in start.params for name in each.opts if name.startswith("--")}
    assert options == PARAMETERS
