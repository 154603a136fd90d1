"""What pods ask for and may use: CPUs, memory, GPUs, and a place to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from k8s_check.facts import Facts
from k8s_check.kuberay import Rule
from k8s_check.quantities import number
from k8s_check.ray_shapes import RayService
from k8s_check.shapes import Quantity

GPU: Final = "nvidia.com/gpu"
_SIZES: Final = ("num-cpus", "num-gpus", "memory", "resources")
_LEAST_MEMORY: Final = 512 * 1024.0**2
"""Of a node of Ray: without any work it takes about as much."""


def resources(service: RayService, _: Facts) -> Iterator[str]:
    """Ray sizes itself by the limits; GPUs and memory cannot be overcommitted."""
    for group, spec in service.groups():
        requests, limits = spec.container.resources.requests, spec.container.resources.limits
        gpus = requests.get(GPU, limits.get(GPU)), limits.get(GPU)
        if number(gpus[0]) != number(gpus[1]):
            yield f"{group}: {GPU} request {gpus[0]} must equal its limit {gpus[1]}"
        if limits.get("memory") is None:
            yield f"{group}: needs a memory limit: Ray would size itself by the node"
        elif gpus[1] is not None and number(requests.get("memory", limits["memory"])) != number(limits["memory"]):
            yield f"{group}: memory request {requests.get('memory')} must equal its limit {limits['memory']}"
        if limits.get("cpu") is None:
            yield f"{group}: needs a cpu limit: Ray would count the CPUs of the node"
        set_by_hand = [key for key in _SIZES if key in spec.ray_start_params]
        if spec is not service.head and set_by_hand:
            yield f"{group}: rayStartParams must leave {', '.join(set_by_hand)} to the limits"
    if GPU in service.head.container.resources.limits:
        yield "head: must have no GPU: nothing runs there that could use it"
    if service.head.ray_start_params.get("num-cpus") != "0":
        yield 'head: rayStartParams must have num-cpus: "0", or replicas run on it and are lost with it'


def bounds(service: RayService, _: Facts) -> Iterator[str]:
    """A request is within its limit, and memory is a number of bytes that Ray can live with."""
    for group, spec in service.groups():
        pod = spec.template.spec
        for container in (*pod.containers, *pod.init_containers):
            yield from _bounds(f"{group}: container {container.name}", container.resources.requests,
                               container.resources.limits)  # fmt: skip
        memory = spec.container.resources.limits.get("memory")
        if memory is not None and number(memory) < _LEAST_MEMORY:
            yield f"{group}: memory limit {memory} is too little for Ray alone ({_LEAST_MEMORY / 1024**2:g}Mi)"
    options = service.cluster.autoscaler_options.resources
    yield from _bounds("autoscalerOptions", options.requests, options.limits)


def writable(service: RayService, _: Facts) -> Iterator[str]:
    """Ray writes to /tmp, whatever HOME is."""
    for group, spec in service.groups():
        container = spec.container
        places = [mount for mount in container.volume_mounts if mount.mount_path.rstrip("/") in ("/tmp", "/tmp/ray")]  # noqa: S108
        if container.security_context.read_only_root_filesystem and not any(not mount.read_only for mount in places):
            yield f"{group}: needs a volume at /tmp that can be written to: the root is read-only, and Ray writes there"


def _bounds(where: str, requests: Mapping[str, Quantity], limits: Mapping[str, Quantity]) -> Iterator[str]:
    for name, asked in requests.items():
        if name in limits and number(asked) > number(limits[name]):
            yield f"{where}: {name} request {asked} is above its limit {limits[name]}"
    for each in (requests.get("memory"), limits.get("memory")):
        if str(each).endswith(("m", "u", "n")):
            yield f"{where}: memory {each} is in thousandths of a byte: Mi?"


RULES: Final[tuple[Rule, ...]] = (resources, bounds, writable)
"""Each says what is wrong; nothing where all is well."""
