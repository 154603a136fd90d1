"""Whether the workers hold what the Serve config wants, packed pod by pod: two halves of a pod hold nothing."""

from __future__ import annotations

from collections.abc import Iterator

from deployment.config import AppConfig
from deployment.serve_file import ServeFile
from k8s_check.quantities import number
from k8s_check.ray_shapes import RayService, Workers
from k8s_check.sizes import GPU

_ROUNDING = 1e-6


def room(service: RayService, file: ServeFile) -> Iterator[str]:
    """The workers there may be hold the replicas there may be, and nobody has to run on the head."""
    app = file.app
    if app.ingress.num_cpus <= 0:
        yield "serveConfigV2: ingress.num_cpus must be above 0, or an ingress may run on the head and is lost with it"
    groups = service.cluster.worker_group_specs
    # fewer at first is no mistake: the autoscaler brings what replicas.min wants
    fits = sum(replicas_on(group, app) * group.max_replicas * group.num_of_hosts for group in groups)
    if fits < app.replicas.max:
        yield f"maxReplicas of the workers hold {fits} replicas, serveConfigV2 wants {app.replicas.max}"
    elif not _all_fit(groups, app):
        yield (
            f"maxReplicas of the workers hold {app.replicas.max} replicas, but not {app.ingress.replicas} ingresses of "
            f"{app.ingress.num_cpus:g} CPUs beside them"
        )


def memory(service: RayService, file: ServeFile) -> Iterator[str]:
    """On CPUs K and V are in the pod's memory, with the weights."""
    most = file.app.engine.max_kv_bytes
    if most is None or file.app.replicas.num_gpus > 0:
        return
    for group in service.cluster.worker_group_specs:
        limit = number(group.container.resources.limits.get("memory"))
        n = min(replicas_on(group, file.app), file.app.replicas.max)
        if n and limit and most * n >= limit:
            yield f"{group.group_name}: engine.max_kv_bytes {most} of {n} replicas is no less than the pod's memory"


def replicas_on(group: Workers, app: AppConfig) -> int:
    """How many replicas one pod of the group holds."""
    cpus, gpus = _has(group)
    by_cpu = int(cpus / app.replicas.num_cpus + _ROUNDING)
    return by_cpu if app.replicas.num_gpus == 0 else min(by_cpu, int(gpus / app.replicas.num_gpus + _ROUNDING))


def _all_fit(groups: list[Workers], app: AppConfig) -> bool:
    """Replicas where they fit, scarcest pods last for ingresses; then ingresses into what is left of each pod."""
    left = [_has(group)[0] for group in groups for _ in range(group.max_replicas * group.num_of_hosts)]
    holds = [replicas_on(group, app) for group in groups for _ in range(group.max_replicas * group.num_of_hosts)]
    size, want, ingress = app.replicas.num_cpus, app.replicas.max, app.ingress.num_cpus
    if ingress <= 0:
        return True
    # a pod gives up the fewest ingresses for a replica first: of those that hold any, in the order of what that costs
    order = sorted(range(len(left)), key=lambda pod: _cost(left[pod], size, ingress))
    for pod in order:
        placed = min(holds[pod], want)
        left[pod] -= placed * size
        want -= placed
    return want == 0 and sum(int(cpus / ingress + _ROUNDING) for cpus in left) >= app.ingress.replicas


def _cost(cpus: float, size: float, ingress: float) -> int:
    return int(cpus / ingress + _ROUNDING) - int(max(cpus - size, 0.0) / ingress + _ROUNDING)


def _has(group: Workers) -> tuple[float, float]:
    limits = group.container.resources.limits
    return number(limits.get("cpu")), number(limits.get(GPU))
