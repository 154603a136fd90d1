"""Whether the workers hold what the Serve config wants, packed pod by pod: two halves of a pod hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deployment.config import AppConfig
from deployment.serve_file import ServeFile
from k8s_check.quantities import number
from k8s_check.ray_shapes import RayService, Workers
from k8s_check.sizes import GPU

_ROUNDING: Final = 1e-6
_NOT_POSSIBLE: Final = -1_000_000_000


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
    elif app.ingress.num_cpus > 0 and _most_ingresses(groups, app) < app.ingress.replicas:
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


def _most_ingresses(groups: list[Workers], app: AppConfig) -> int:
    """How many ingresses fit beside all replicas, these placed in the best way there is.

    Over the pods, one after the other: the most ingresses for each number of replicas placed so far.
    """
    want, size, ingress = app.replicas.max, app.replicas.num_cpus, app.ingress.num_cpus
    most = [0] + [_NOT_POSSIBLE] * want
    for group in groups:
        holds = min(replicas_on(group, app), want)
        beside = [int((_has(group)[0] - n * size) / ingress + _ROUNDING) for n in range(holds + 1)]
        for _ in range(group.max_replicas * group.num_of_hosts):
            for placed in range(want, -1, -1):
                most[placed] = max(most[placed - n] + beside[n] for n in range(min(holds, placed) + 1))
    return most[want]


def _has(group: Workers) -> tuple[float, float]:
    limits = group.container.resources.limits
    return number(limits.get("cpu")), number(limits.get(GPU))
