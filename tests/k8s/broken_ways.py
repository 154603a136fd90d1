"""Broken on purpose: who reaches what. Doors to the head, services, network policies, and Secrets."""

from __future__ import annotations

from typing import Any

from tests.k8s.breaking import HEAD, POD, Case, Change, add, both, drop, put

NP = "NetworkPolicy"
DASHBOARD = [{"port": 80, "targetPort": "dashboard"}]
OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
LABEL = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}},
         "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay"}}}  # fmt: skip


def beside(kind: str, api: str, spec: dict[str, Any]) -> Change:
    made = {"apiVersion": api, "kind": kind, "metadata": {"name": "mine", "namespace": "orca"}, "spec": spec}
    return lambda objects: objects.append(made)


def service(**spec: object) -> Change:
    return beside("Service", "v1", {"selector": {"ray.io/node-type": "head"}, **spec})


def ingress(to: str, **port: object) -> Change:
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": {"name": to, "port": port}}}
    return beside("Ingress", "networking.k8s.io/v1", {"rules": [{"http": {"paths": [path]}}]})


WAYS: dict[str, Case] = {
    "head as LoadBalancer": ("cpu", put(f"{HEAD}.serviceType", "LoadBalancer"), "serviceType LoadBalancer opens the"),
    "head as NodePort": (
        "cpu", put(f"{HEAD}.headService", {"spec": {"type": "NodePort"}}), "headService.spec.type NodePort opens the"),
    "ingress of the operator": ("cpu", put(f"{HEAD}.enableIngress", True), "head: enableIngress opens the dashboard"),
    "ingress to the head": (
        "cpu", ingress("orca-head-svc", number=8265), "Ingress/mine: backend orca-head-svc:8265 is the head"),
    "ingress to the head by a service between": (
        "cpu", both(service(ports=[{"name": "web", **DASHBOARD[0]}]), ingress("mine", name="web")),
        "Ingress/mine: backend mine:web is the head"),
    "service for the dashboard": (
        "cpu", service(type="NodePort", ports=[{"port": 8265}]), "Service/mine: opens the head's dashboard"),
    "service for the dashboard by name": (
        "cpu", service(type="LoadBalancer", ports=DASHBOARD), "Service/mine: opens the head's dashboard"),
    "service for one cluster's GCS": (
        "cpu", service(selector={"ray.io/node-type": "head", "ray.io/cluster": "orca-x"}, externalIPs=["192.0.2.1"],
                       ports=[{"port": 6379}]), "Service/mine: opens the head's GCS"),
    "pods that are not ready": (
        "cpu", put("spec.serveService.spec.publishNotReadyAddresses", True),
        "publishNotReadyAddresses sends clients to pods"),
    "gRPC over UDP": (
        "cpu", put("spec.serveService.spec.ports.1.protocol", "UDP"), "port 'serve-grpc' must be TCP, not UDP"),
    "policy: dashboard for all namespaces": (
        "gpu", add("spec.ingress", {"from": [{"namespaceSelector": {}}], "ports": [{"port": 8265}]}, NP),
        "opens port 8265 (dashboard) to everybody"),
    "policy: operator or all namespaces": (
        "gpu", put("spec.ingress.1.from", [{"namespaceSelector": {}}, OPERATOR], NP),
        "opens port 8265 (dashboard) to everybody"),
    "policy: label of Ray's pods for the operator's": (
        "gpu", put("spec.ingress.1.from", [LABEL], NP), "'kuberay' is no label of KubeRay's operator"),
    "policy: pods that reach nobody but DNS": (
        "gpu", both(put("spec.policyTypes", ["Ingress", "Egress"], NP),
                    put("spec.egress", [{"ports": [{"protocol": "UDP", "port": 53}]}], NP)),
        "head: egress must let the pods of the cluster reach each other"),
}  # fmt: skip


def secret(name: str, *keys: str, namespace: str = "orca") -> Change:
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace},
            "stringData": dict.fromkeys(keys, "x")}  # fmt: skip
    return lambda objects: objects.append(made)


KEYS = "volumes.3.secret"  # of a worker
RENAMED = [{"key": "api-keys", "path": "keys"}]

SECRETS: dict[str, Case] = {
    "keys of workers from another Secret": (
        "gpu", put(f"{POD}.{KEYS}.secretName", "orca-api-key"), "from the Secret orca-api-key/api-keys, the head's"),
    "keys of workers from another key": (
        "gpu", put(f"{POD}.{KEYS}.items", [{"key": "old", "path": "api-keys"}]), "orca-api-keys/old, the head's"),
    "keys as a file of another name": ("gpu", put(f"{POD}.{KEYS}.items", RENAMED), "items put no file api-keys there"),
    "keys that are no Secret": ("gpu", drop(f"{POD}.{KEYS}"), "workers: the API keys must come from a Secret"),
    "Secret of a generator": (
        "gpu", secret("orca-api-keys-2f8ghk24hm", "api-keys"), "kustomize calls it orca-api-keys-2f8ghk24hm"),
    "Secret with another key": (
        "gpu", secret("orca-api-keys", "keys"), "Secret orca-api-keys has no key api-keys; it has: keys"),
    "Secret in another namespace": (
        "gpu", secret("orca-api-keys", "api-keys", namespace="default"),
        "orca-api-keys is in namespace default, the pods are in orca"),
    "Secret of Redis with another key": (
        "gpu+", secret("orca-redis", "pass"), "redisPassword: Secret orca-redis has no key password"),
    "Secret for the hub with another key": (
        "gpu", secret("orca-hf", "hf_token"), "env HF_TOKEN: Secret orca-hf has no key token"),
}  # fmt: skip
