"""Everything beside the RayService: it has to fit to the pods the RayService makes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from k8s_check import credentials, exposed, model_cache, monitoring, policies, redis, routes
from k8s_check.kuberay import is_our_image, tag_of
from k8s_check.pod_shapes import PodSpec, Volume
from k8s_check.pods import in_clear
from k8s_check.ray_shapes import RayService
from k8s_check.render import Object
from k8s_check.selecting import our_pods, selects, templates

_ON_PODS: Final = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}


def check(objects: list[Object], service: RayService) -> Iterator[str]:
    """All of this module's rules over the objects of one overlay."""
    for rule_of_all in (
        namespaces, references, admission, exposed.check, policies.network_policies, redis.check, credentials.check,
        model_cache.check,
    ):  # fmt: skip
        yield from _carefully(rule_of_all(objects, service))
    yield from monitoring.kinds(objects)
    for each in objects:
        rule = _BY_KIND.get(each["kind"])
        if rule is not None:
            name = each.get("metadata", {}).get("name")
            yield from (f"{each['kind']}/{name}: {problem}" for problem in _carefully(rule(each, service, objects)))


def _carefully(problems: Iterator[str]) -> Iterator[str]:
    """Objects beside the RayService have no shape of their own: what a rule cannot read is said, and is no crash."""
    try:
        yield from problems
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        yield f"a field is missing, or of another type than Kubernetes wants: {error!r}"


def namespaces(objects: list[Object], service: RayService) -> Iterator[str]:
    """What acts on pods of its own namespace only, and is meant for ours, is in ours."""
    ours = our_pods(service).values()
    home = service.metadata.namespace or None
    found = {
        each["metadata"].get("namespace")
        for each in objects if each["kind"] in _ON_PODS
        if any(selects(each["spec"].get(_ON_PODS[each["kind"]]), labels) for labels in ours)
    }  # fmt: skip
    if found - {home}:
        yield f"objects lie in several namespaces: {', '.join(sorted(map(str, found | {home})))}"


def admission(objects: list[Object], service: RayService) -> Iterator[str]:
    """A Namespace that is here lets its pods in: at `baseline` and above none that is half on the node."""
    levels = [
        (each["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
        for each in objects if each["kind"] == "Namespace" and each["metadata"]["name"] == service.metadata.namespace
    ]  # fmt: skip
    if not {"baseline", "restricted"} & set(levels):
        return
    (raw,) = [each["spec"]["rayClusterConfig"] for each in objects if each["kind"] == "RayService"]
    pods = [("head", raw["headGroupSpec"]), *((each["groupName"], each) for each in raw["workerGroupSpecs"])]
    for group, made_of in pods:
        pod = made_of["template"]["spec"]
        said = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
        said += ["hostPath"] if any("hostPath" in each for each in pod.get("volumes") or []) else []
        yield from (f"{group}: {key}: namespace {service.metadata.namespace} lets no such pod in" for key in said)


def references(objects: list[Object], service: RayService) -> Iterator[str]:
    """A ConfigMap or claim may be made elsewhere; nearly the name of one here that nobody mounts is a typo.

    Secrets are made by hand, and not looked for; those that are here: ``credentials``.
    """
    there = {(each["kind"], str(each["metadata"]["name"])) for each in objects}
    pods = [(group, spec.template.spec) for group, spec in service.groups()]
    pods += [(f"{each['kind']}/{each['metadata']['name']}", PodSpec.model_validate(made_of["spec"]))
             for each, made_of in templates(objects)]  # fmt: skip
    wanted = [(group, volume.name, *each) for group, pod in pods for volume in pod.volumes for each in mounted(volume)]
    unused = there - {(kind, name) for *_, kind, name in wanted}
    for group, volume, kind, name in wanted:
        near = difflib.get_close_matches(name, [each for of, each in unused if of == kind], n=1, cutoff=0.8)
        if (kind, name) not in there and near:
            yield f"{group}: volume {volume!r}: no {kind} {name}; did you mean {near[0]}?"


def mounted(volume: Volume) -> Iterator[tuple[str, str]]:
    """Kind and name of what a volume is made of."""
    if volume.config_map and not volume.config_map.optional:
        yield "ConfigMap", volume.config_map.name
    if volume.persistent_volume_claim:
        yield "PersistentVolumeClaim", volume.persistent_volume_claim.claim_name


def serve_config_copy(each: Object, service: RayService) -> Iterator[str]:
    """A ConfigMap that carries the Serve config carries the one that is served."""
    copy = each.get("data", {}).get("serve-config.yaml")
    if copy is not None and copy != service.spec.serve_config_v2:
        yield "serve-config.yaml differs from serveConfigV2: list config-* before what copies it"


def config_map(each: Object, service: RayService, objects: list[Object]) -> Iterator[str]:
    """Both rules for ConfigMaps."""
    yield from monitoring.dashboards(each, service, objects)
    yield from serve_config_copy(each, service)


def template(each: Object, service: RayService, _: list[Object]) -> Iterator[str]:
    """A Job or StatefulSet beside: pinned images, mounts with volumes, no secret in clear, and not as root."""
    pod = PodSpec.model_validate(each["spec"]["template"]["spec"])
    ours = {spec.container.image for _, spec in service.groups()}
    for container in (*pod.containers, *pod.init_containers):
        if tag_of(container.image) in ("", "latest"):
            yield f"image {container.image!r} is not pinned"
        if is_our_image(container.image) and container.image not in ours:
            yield f"image {container.image!r} must be the service's own, {sorted(ours)[-1]!r}"
        for mount in container.volume_mounts:
            claimed = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])]
            if mount.name not in [*claimed, *(volume.name for volume in pod.volumes)]:
                yield f"container {container.name}: volumeMount {mount.name!r} has no volume"
        yield from (f"container {container.name}: {said}" for said in in_clear(container))
    if each["kind"] == "Job" and pod.restart_policy not in ("Never", "OnFailure"):
        yield f"restartPolicy of a Job must be Never or OnFailure, not {pod.restart_policy}"
    who = pod.security_context
    if not who.run_as_non_root or who.run_as_user == 0:
        yield "securityContext must say runAsNonRoot, and no user 0"
    wanted, labels = each["spec"].get("selector"), each["spec"]["template"].get("metadata", {}).get("labels", {})
    if wanted is not None and not selects(wanted, labels):
        yield "selector does not select its own pods"


_BY_KIND: Final[Mapping[str, Callable[[dict[str, Any], RayService, list[Object]], Iterator[str]]]] = {
    "PodDisruptionBudget": policies.disruption_budget,
    "PodMonitor": monitoring.pod_monitor,
    "PrometheusRule": monitoring.metrics_exist,
    "ConfigMap": config_map,
    "Job": template,
    "StatefulSet": template,
    "Gateway": routes.gateway,
    "HTTPRoute": routes.route,
    "GRPCRoute": routes.route,
}
