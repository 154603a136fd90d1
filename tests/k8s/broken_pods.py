"""Broken on purpose: pods, what starts Ray in them, and the Serve config."""

from __future__ import annotations

from tests.k8s.breaking import (
    CLUSTER,
    HEAD,
    HEAD_POD,
    HEAD_RAY,
    POD,
    RAY,
    WORKERS,
    Case,
    add,
    both,
    config,
    drop,
    env,
    put,
)  # fmt: skip

SIDECAR = {"name": "slow", "image": "r/slow:1", "env": [{"name": "DB_PASSWORD", "value": "x"}]}

PODS: dict[str, Case] = {
    "cpu request above its limit": (
        "cpu", put(f"{RAY}.resources.requests.cpu", "5"), "ray-worker: cpu request 5 is above its limit 3"),
    "memory request above its limit": (
        "cpu", put(f"{HEAD_RAY}.resources.requests.memory", "8Gi"), "memory request 8Gi is above its limit 4Gi"),
    "memory in Mi for Gi": (
        "cpu", put(f"{RAY}.resources", {"limits": {"cpu": "3", "memory": "4Mi"}}), "memory limit 4Mi is too little"),
    "memory in thousandths": (
        "cpu", put(f"{RAY}.resources", {"limits": {"cpu": "3", "memory": "4096m"}}),
        "4096m is in thousandths of a byte"),
    "limit of 3k CPUs and no room for them": (
        "cpu", both(put(f"{RAY}.resources.limits.cpu", "3k"), put(f"{RAY}.resources.requests.cpu", "4k")),
        "cpu request 4k is above its limit 3k"),
    "no /tmp": ("cpu", drop(f"{RAY}.volumeMounts.0"), "workers: needs a volume at /tmp that can be written to"),
    "/tmp read-only": ("cpu", put(f"{HEAD_RAY}.volumeMounts.0.readOnly", True), "head: needs a volume at /tmp"),
    "two mounts at one place": (
        "cpu", add(f"{RAY}.volumeMounts", {"name": "tmp", "mountPath": "/tmp"}), "mountPath /tmp is given twice"),
    "autoscaler without a token": (
        "cpu", put(f"{HEAD_POD}.automountServiceAccountToken", False),
        "head: automountServiceAccountToken must not be"),
    "autoscaler that may do more": (
        "cpu", drop(f"{CLUSTER}.autoscalerOptions.securityContext"), "autoscalerOptions.securityContext must have"),
    "keys nobody can read": (
        "gpu", drop(f"{POD}.securityContext.fsGroup"), "volume 'api-keys': without fsGroup nobody but root"),
    "unconfined": (
        "cpu", put(f"{POD}.securityContext.seccompProfile.type", "Unconfined"), "1000:100 and a seccompProfile"),
    "pod on the node's network": ("cpu", put(f"{POD}.hostNetwork", True), "hostNetwork: namespace orca lets no such"),
    "no preStop to speak of": ("cpu", put(f"{RAY}.lifecycle.preStop.sleep.seconds", 0), "preStop.sleep of 0 s is none"),
    "token in clear": ("cpu", env(HEAD_RAY, "HF_TOKEN", "hf_x"), "ray-head: env HF_TOKEN is in clear"),
    "API key in clear": ("cpu", env(RAY, "ORCA_API_KEY", "x"), "ray-worker: env ORCA_API_KEY is in clear"),
    "password in clear in a sidecar": ("cpu", add(f"{POD}.containers", SIDECAR), "env DB_PASSWORD is in clear"),
    "variable from a Secret on the head only": (
        "cpu", both(add(f"{HEAD_RAY}.env", {"name": "HF_TOKEN",
                                            "valueFrom": {"secretKeyRef": {"name": "hf", "key": "a"}}}),
                    add(f"{RAY}.env", {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "b"}}})),
        "workers: env HF_TOKEN must be the same as on the head"),
    "no dashboard port": ("cpu", drop(f"{HEAD_RAY}.ports.1"), "needs a container port 8265 named 'dashboard'"),
    "dashboard port of another number": (
        "cpu", put(f"{HEAD_RAY}.ports.1.containerPort", 8266), "port 'dashboard' is 8266, Ray's is 8265"),
    "metrics port of another number": (
        "cpu", put(f"{RAY}.ports.0.containerPort", 8081), "workers: port 'metrics' is 8081, Ray's is 8080"),
    "metrics moved by a parameter": (
        "cpu", put(f"{WORKERS}.rayStartParams", {"metrics-export-port": "9999"}), "Ray's is 9999"),
    "dashboard for the head alone": (
        "cpu", put(f"{HEAD}.rayStartParams", {"num-cpus": "0", "dashboard-host": "127.0.0.1"}),
        "dashboard-host 127.0.0.1: the operator would not reach it"),
    "parameter that Ray does not know": (
        "cpu", put(f"{WORKERS}.rayStartParams", {"num-gpu": "1"}),
        "workers: rayStartParams: ray start knows no --num-gpu"),
    "labels as a parameter": (
        "cpu", put(f"{WORKERS}.rayStartParams", {"labels": "a=b"}), "the operator refuses labels"),
    "two groups of one name": (
        "cpu", lambda objects: [each["spec"]["rayClusterConfig"]["workerGroupSpecs"].append(
            each["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]) for each in objects
            if each["kind"] == "RayService"] and None, "groupName 'workers' is given twice"),
    "group that is no label": ("cpu", put(f"{WORKERS}.groupName", "Workers_1"), "groupName 'Workers_1' must be"),
    "image of the base": ("cpu", both(put(f"{RAY}.image", "orca-serve:0.1.0"), put(f"{HEAD_RAY}.image",
                          "orca-serve:0.1.0")), "'orca-serve:0.1.0' is the name of k8s/base"),
    "image of another Ray": ("cpu", put(f"{RAY}.image", "r/mine:1-ray2.1.0"), "'r/mine:1-ray2.1.0' has Ray 2.1.0"),
    "other tag beside": (
        "gpu", put(f"{POD}.initContainers.0.image", "r/orca-serve:5"), "'r/orca-serve:5' must be the service's own"),
    "list where a mapping belongs": ("cpu", put(f"{POD}.affinity", []), "spec.affinity: must be a mapping"),
    "typo in what no rule looks at": (
        "cpu", put(f"{POD}.affinity", {"nodeAfinity": {}}), "nodeAfinity: unknown field; did you mean nodeAffinity?"),
}  # fmt: skip

SERVE: dict[str, Case] = {
    "Serve's time limit over HTTP": (
        "cpu", config("  port: 8000", "  port: 8000\n  request_timeout_s: 30"),
        "http_options.request_timeout_s 30 cuts requests of 300 s"),
    "Serve's time limit over gRPC": (
        "cpu", config("  port: 9000", "  port: 9000\n  request_timeout_s: 30"),
        "grpc_options.request_timeout_s 30 cuts requests of 300 s"),
    "no health service": (
        "cpu", config("    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server\n", ""),
        "grpc_servicer_functions lacks grpc_health"),
    "override of a drain": (
        "cpu", config("    args:", "    deployments: [{name: Replica, graceful_shutdown_timeout_s: 2}]\n    args:"),
        "deployments: Replica.graceful_shutdown_timeout_s overrides"),
    "override of CPUs": (
        "cpu", config("    args:", "    deployments: [{name: Replica, ray_actor_options: {num_cpus: 16}}]\n    args:"),
        "Replica.ray_actor_options replaces all of them: num_cpus is 16, args say 2"),
    "override that takes the GPU away": (
        "gpu", config("    args:", "    deployments: [{name: Replica, ray_actor_options: {num_cpus: 4}}]\n    args:"),
        "num_gpus is 0, args say 1"),
    "override of nobody": (
        "cpu", config("    args:", "    deployments: [{name: Replicas, max_queued_requests: 9}]\n    args:"),
        "none is called 'Replicas'; there are Replica and Ingress"),
    "keys that nothing mounts": (
        "cpu", config("    args:", "    args:\n      auth: {api_keys_file: /k/keys}"),
        "auth.api_keys_file /k/keys: nothing is"),
    "certificate that nothing mounts": (
        "cpu", config("  port: 8000", "  port: 8000\n  ssl_certfile: /c/x.pem\n  ssl_keyfile: /c/x.key"),
        "http_options.ssl_certfile /c/x.pem: nothing is mounted"),
    "model that nothing mounts": (
        "gpu", config("source: smollm2-135m-instruct", "source: /weights/m"),
        "model.source /weights/m: nothing is mounted"),
    "ingress that fits beside no replica": (
        "cpu", config("num_cpus: 0.5", "num_cpus: 1.5"),
        "hold 4 replicas, but not 2 ingresses of 1.5 CPUs beside them"),
    "K and V of more than the pod": (
        "cpu", config("536870912", "8589934592"), "engine.max_kv_bytes 8589934592 of 1 replicas is no less than"),
    "alert on none where there may be none": (
        "gpu", both(config("min: 2", "min: 0"), put("spec.groups.0.rules.0.expr", "absent(ray_orca_slots_total)",
                                                    "PrometheusRule")), "replicas.min is 0"),
}  # fmt: skip
