"""Broken on purpose: policies, budgets, metrics, routes, Redis, and the model's volume."""

from __future__ import annotations

from tests.k8s.breaking import CLUSTER, POD, RAY, Case, add, both, drop, env, put, text

NP, PM, PR, PDB = "NetworkPolicy", "PodMonitor", "PrometheusRule", "PodDisruptionBudget"
BOARD = "ConfigMap/orca-dashboard"

BESIDE: dict[str, Case] = {
    "policy of nothing": ("gpu", drop("spec", NP), "a field is missing"),
    "route that is no list": ("gpu+", put("spec.rules", {"a": 1}, "HTTPRoute"), "HTTPRoute/orca: a field is missing"),
    "policy that misses all pods": (
        "gpu", put("spec.podSelector.matchLabels", {"app.kubernetes.io/name": "orca"}, NP),
        "NetworkPolicy/orca: does not select the pods of head"),
    "policy that misses the head": (
        "gpu", put("spec.podSelector.matchLabels", {"app.kubernetes.io/component": "worker"}, NP),
        "NetworkPolicy/orca: does not select the pods of head"),
    "policy without Ray's agent": ("gpu", drop("spec.ingress.1.ports.2", NP), "head: lets nobody reach port 52365"),
    "policy without the autoscaler's metrics": (
        "gpu", drop("spec.ingress.2.ports.1", NP), "lets nobody reach port 44217 (as-metrics)"),
    "policy for UDP": ("gpu", put("spec.ingress.3.ports.1.protocol", "UDP", NP), "lets nobody reach port 9000"),
    "policy that lets nothing out": (
        "gpu", put("spec.policyTypes", ["Ingress", "Egress"], NP), "head reaches nobody"),
    "dashboard for everybody": (
        "gpu", add("spec.ingress.3.ports", {"protocol": "TCP", "port": 8265}, NP),
        "opens port 8265 (dashboard) to every"),
    "GCS for every address": (
        "gpu", add("spec.ingress", {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 6379}]}, NP),
        "opens port 6379 (GCS) to everybody"),
    "rule for everything": ("gpu", add("spec.ingress", {}, NP), "opens port 8265 (dashboard) to everybody"),
    "budget of nothing": ("cpu", put("spec.minAvailable", 0, PDB), "minAvailable 0 keeps nothing"),
    "budget above what there may be": ("cpu", put("spec.minAvailable", 4, PDB), "there are maxReplicas 4"),
    "budget that keeps idle workers": (
        "cpu", drop("spec.unhealthyPodEvictionPolicy", PDB), "unhealthyPodEvictionPolicy must be AlwaysAllow"),
    "budget that misses the workers": (
        "cpu", put("spec.selector.matchLabels", {"app.kubernetes.io/component": "wroker"}, PDB), "selects no worker"),
    "monitor: unknown field": (
        "gpu", put("spec.podMetricEndpoints", [], PM), "unknown field; did you mean podMetricsEndpoints?"),
    "monitor: path": ("gpu", put("spec.podMetricsEndpoints.0.path", "/metric", PM), "path /metric is not where Ray"),
    "monitor: no endpoint of ours": (
        "gpu", drop("spec.podMetricsEndpoints.0", PM), "has no endpoint for the port metrics"),
    "monitor: other namespace": (
        "gpu", put("spec.namespaceSelector", {"matchNames": ["default"]}, PM), "looks into default, not into orca"),
    "monitor: other pods": (
        "gpu", put("spec.selector.matchLabels", {"app": "x"}, PM),
        "PodMonitor/orca-serve: does not select the pods of"),
    "monitor: kind": (
        "gpu", put("kind", "PodMonitors", PM), "no kind of monitoring.coreos.com; did you mean PodMonitor?"),
    "metric without its prefix": (
        "gpu", put("spec.groups.0.rules.0.expr", "absent(orca_slots_total)", PR), "knows orca_slots_total as ray_orca"),
    "metric with half a prefix": (
        "gpu", text(BOARD, "orca-serve.json", "ray_orca_slots_used", "rayorca_slots_used"),
        "knows rayorca_slots_used as"),
    "label of another metric": (
        "gpu", put("spec.groups.0.rules.0.expr", 'ray_orca_slots_total{outcome="x"}', PR), "has no label outcome"),
    "label with a typo": (
        "gpu", put("spec.groups.0.rules.0.expr", 'ray_orca_slots_total{replicas="x"}', PR), "has no label replicas"),
    "dashboard that is no JSON": ("gpu", put("data", {"orca-serve.json": "{"}, BOARD), "orca-serve.json is not JSON"),
    "route from another gateway": (
        "gpu+", put("spec.parentRefs.0.name", "orka", "HTTPRoute"), "parentRef orka: the Gateway here is orca"),
    "route from no listener": (
        "gpu+", put("spec.parentRefs.0.sectionName", "htps", "HTTPRoute"), "no listener is called htps"),
    "route of another host": (
        "gpu+", put("spec.hostnames", ["x.example.com"], "GRPCRoute"), "hostnames x.example.com are not those"),
    "gRPC to the HTTP face": (
        "gpu+", put("spec.rules.0.backendRefs.0.port", 8000, "GRPCRoute"), "a GRPCRoute needs the port serve-grpc"),
    "HTTP to the gRPC face": (
        "gpu+", put("spec.rules.0.backendRefs.0.port", 9000, "HTTPRoute"), "the HTTP face has no route"),
    "route to the dashboard": (
        "gpu+", add("spec.rules.0.backendRefs", {"name": "orca-head-svc", "port": 8265}, "HTTPRoute"), "is the head"),
    "backend's time limit": (
        "gpu+", put("spec.rules.0.timeouts", {"backendRequest": "10s"}, "HTTPRoute"),
        "timeouts.backendRequest 10s cuts"),
    "listener without a certificate": (
        "gpu+", drop("spec.listeners.0.tls.certificateRefs", "Gateway"), "listener https: needs certificateRefs"),
    "listener that passes TLS on": (
        "gpu+", put("spec.listeners.0.tls.mode", "Passthrough", "Gateway"), "HTTPS must end here"),
    "keys in clear": ("gpu+", put("spec.listeners.0", {"name": "https", "port": 80, "protocol": "HTTP"}, "Gateway"),
                      "API keys would go in clear"),
}  # fmt: skip

FT = f"{CLUSTER}.gcsFaultToleranceOptions"
SET, SERVICE = "StatefulSet/orca-redis", "Service/orca-redis"
REDIS = "spec.template.spec.containers.0"
JOB = "spec.template.spec.containers.0"

REDIS_AND_MODELS: dict[str, Case] = {
    "Redis: no such service": ("gpu+", put(f"{FT}.redisAddress", "orca-redi:6379"), "did you mean orca-redis?"),
    "Redis: other port": ("gpu+", put(f"{FT}.redisAddress", "orca-redis:6380"), "its Service has no port 6380"),
    "Redis: no port": ("gpu+", put(f"{FT}.redisAddress", "orca-redis"), "must be host:port"),
    "Redis: service without pods": (
        "gpu+", put("spec.selector", {"app": "redis"}, SERVICE), "its Service selects no pods that are here"),
    "Redis: target port": ("gpu+", put("spec.ports.0.targetPort", "rediss", SERVICE), "'rediss' is no port of the pod"),
    "Redis: no password": ("gpu+", drop(f"{FT}.redisPassword"), "wants a password (--requirepass)"),
    "Redis: password in clear": (
        "gpu+", put(f"{FT}.redisPassword", {"value": "x"}), "redisPassword.value is in clear"),
    "Redis: two passwords": (
        "gpu+", put(f"{FT}.redisPassword.valueFrom.secretKeyRef.name", "other"), "redisPassword is other/password"),
    "Redis: two of them": ("gpu+", put("spec.replicas", 2, SET), "StatefulSet has 2 replicas, which know nothing"),
    "Redis: nothing on the disk": (
        "gpu+", put(f"{REDIS}.args", ["redis-server", "--requirepass", "$(REDIS_PASSWORD)"], SET),
        "redis-server needs --appendonly yes"),
    "Redis: as root": (
        "gpu+", put("spec.template.spec.securityContext.runAsUser", 0, SET), "must say runAsNonRoot, and no user 0"),
    "Redis: not its own pods": (
        "gpu+", put("spec.selector.matchLabels", {"app": "x"}, SET), "selector does not select its own pods"),
    "Redis: closed to the head": (
        "gpu+", put("spec.ingress.0.from.0.podSelector.matchLabels", {"app": "x"}, "NetworkPolicy/orca-redis"),
        "does not let the head reach port 6379"),
    "Redis: policy on nothing": (
        "gpu+", put("spec.podSelector.matchLabels", {"app": "x"}, "NetworkPolicy/orca-redis"),
        "NetworkPolicy/orca-redis: selects no pods that are here"),
    "model: Job that is offline": (
        "gpu", add(f"{JOB}.env", {"name": "HF_HUB_OFFLINE", "value": "1"}, "Job"), "it downloads nothing"),
    "model: Job with another folder": (
        "gpu", put(f"{JOB}.env.0.value", "/models/x", "Job"), "HF_HUB_CACHE is /models/x, workers have /models/hub"),
    "model: Job with another claim": (
        "gpu", put("spec.template.spec.volumes.0.persistentVolumeClaim.claimName", "elsewhere", "Job"),
        "lies on the claim elsewhere, workers have orca-models"),
    "model: Job that may not write": ("gpu", put(f"{JOB}.volumeMounts.0.readOnly", True, "Job"), "is mounted readOnly"),
    "model: claim that may not be written": (
        "gpu", put("spec.template.spec.volumes.0.persistentVolumeClaim.readOnly", True, "Job"), "is mounted readOnly"),
    "model: Job that restarts": (
        "gpu", put("spec.template.spec.restartPolicy", "Always", "Job"), "must be Never or OnFailure"),
    "model: token in clear": (
        "gpu", put(f"{JOB}.env.2", {"name": "HF_TOKEN", "value": "hf_x"}, "Job"), "download: env HF_TOKEN is in clear"),
    "model: claim for one node": (
        "gpu", put("spec.accessModes", ["ReadWriteOnce"], "PersistentVolumeClaim"), "ReadWriteOnce: workers may wait"),
    "model: no such script": (
        "gpu", drop("data", "ConfigMap/orca-model"), "ConfigMap orca-model has no find_model.py"),
    "model: nothing at the worker's folder": (
        "gpu", env(RAY, "HF_HUB_CACHE", "/cache"), "workers: nothing is mounted at HF_HUB_CACHE /cache"),
    "model: waiting for another folder": (
        "gpu", put(f"{POD}.initContainers.0.env.0.value", "/models/x"), "HF_HUB_CACHE is /models/x, the worker's is"),
    "model: claim that is called otherwise": (
        "gpu", both(put(f"{POD}.volumes.1.persistentVolumeClaim.claimName", "orca-model"),
                    put("spec.template.spec.volumes.0.persistentVolumeClaim.claimName", "orca-model", "Job")),
        "no PersistentVolumeClaim orca-model; did you mean orca-models?"),
}  # fmt: skip
