"""The embedded Serve config, and all that has to fit to it: ports, room, and the time it takes to leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deployment.config import AppConfig
from deployment.serve_file import ServeFile, parse_serve_text
from k8s_check import room, serve_rules
from k8s_check.facts import Facts
from k8s_check.pods import SAFE_TO_EVICT, sleep_s
from k8s_check.ray_shapes import Group, RayService, ServicePort, Workers
from orca_core.errors import ConfigError

_LOOPBACK: Final = ("127.", "localhost", "::1")
_DRAIN: Final = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_RAY_DRAIN_S: Final = 30.0
"""Ray's own, where the variable is not set."""
_HARD_STOP: Final = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
_HARD_STOP_S: Final = 120.0
_TO_END_S: Final = 20
"""From the end of Ray's drain to that of the container."""
_EVICTION_S: Final = 600
"""Of the cluster autoscaler: --max-graceful-termination-sec, as it comes."""
_H2C: Final = "kubernetes.io/h2c"


def check(service: RayService, _: Facts) -> Iterator[str]:
    """All of this module's rules; the first alone where the config cannot be read."""
    try:
        file = parse_serve_text(service.spec.serve_config_v2)
    except ConfigError as error:
        yield f"serveConfigV2: {error}"
        return
    for rule in (
        faces,
        ports,
        serve_service,
        room.room,
        room.memory,
        serve_rules.time_limits,
        serve_rules.servicers,
        serve_rules.overrides,
        serve_rules.files,
        leaving,
        upgrades,
    ):
        yield from rule(service, file)


def faces(_: RayService, file: ServeFile) -> Iterator[str]:
    """Both faces are up, on every node, for everybody the Service lets in."""
    if file.host.startswith(_LOOPBACK):
        yield f"serveConfigV2: http_options.host {file.host} is loopback: no Service reaches it"
    if file.document.get("proxy_location", "EveryNode") != "EveryNode":
        where = file.document["proxy_location"]
        yield f"serveConfigV2: proxy_location {where} leaves workers NotReady for ever: it must be EveryNode"
    if not file.document.get("grpc_options"):
        yield "serveConfigV2: without grpc_options there is no gRPC proxy"


def ports(service: RayService, file: ServeFile) -> Iterator[str]:
    """What Serve listens on is what the pods declare: the probes of the operator ask there."""
    for group, spec in service.groups():
        for port_name, number in (("serve", file.http_port), ("serve-grpc", file.grpc_port)):
            declared = spec.container.port(port_name)
            if declared is None:
                yield f"{group}: needs a container port {number} named {port_name!r}"
            elif declared != number:
                yield f"{group}: port {port_name!r} is {declared}, the Serve config says {number}"


def serve_service(service: RayService, file: ServeFile) -> Iterator[str]:
    """Headless, with both ports, under names that the operator keeps."""
    given = service.spec.serve_service
    if given is None:
        yield "serveService is missing: the operator's own has an address, which pins a gRPC client to one pod"
        return
    if given.spec.cluster_i_p != "None":
        yield "serveService must be headless (clusterIP: None), or a gRPC client stays with one pod"
    if given.spec.publish_not_ready_addresses:
        yield "serveService: publishNotReadyAddresses sends clients to pods that do not serve yet, or no more"
    on_head = {port.name for port in service.head.container.ports}
    for port in given.spec.ports:
        yield from (f"serveService: port {port.name!r} {said}" for said in _serve_port(port, on_head))
    numbers = {port.port: port for port in given.spec.ports}
    for number in (file.http_port, file.grpc_port):
        if number not in numbers:
            yield f"serveService: port {number} of the Serve config is not exposed"
    grpc = numbers.get(file.grpc_port)
    if grpc is not None and grpc.app_protocol != _H2C:
        yield f"serveService: port {grpc.name!r} needs appProtocol: {_H2C}, by which gateways know HTTP/2"


def _serve_port(port: ServicePort, on_head: set[str]) -> Iterator[str]:
    if port.name != "serve" and not port.name.startswith("serve-"):
        yield "is dropped by the operator: it must be serve or serve-*"
    elif port.name not in on_head:
        yield "is dropped by the operator: the head declares none of that name"
    if port.protocol != "TCP":
        yield f"must be TCP, not {port.protocol}"
    if port.port != (port.target_port or port.port):
        yield f"cannot be mapped from {port.port} to {port.target_port}: the service is headless"


def leaving(service: RayService, file: ServeFile) -> Iterator[str]:
    """Longest request <= drain <= Serve's graceful shutdown < Ray's drain; sleep + Ray's drain + the end <= grace."""
    longest, drain = file.app.limits.max_request_seconds, file.app.drain.timeout_s
    if drain < longest:
        yield f"serveConfigV2: drain.timeout_s {drain:g} must be at least limits.max_request_seconds {longest:g}"
    graceful = graceful_shutdown_s(file.app)
    if graceful < drain:
        yield f"Serve's graceful shutdown {graceful:g} s must be at least drain.timeout_s {drain:g}"
    for group, spec in service.groups():
        yield from (f"{group}: {said}" for said in _leaves(spec, longest, graceful))


def _leaves(spec: Group, longest: float, graceful: float) -> Iterator[str]:
    """The sums of one pod."""
    seconds = {}
    for variable, of_ray in ((_DRAIN, _RAY_DRAIN_S), (_HARD_STOP, _HARD_STOP_S)):
        given = spec.container.value(variable)
        try:
            seconds[variable] = of_ray if given is None else float(given)
        except ValueError:
            yield f"{variable} {given!r} must be a number of seconds, without a unit"
    drain, grace = seconds.get(_DRAIN), spec.template.spec.termination_grace_period_seconds
    if drain is not None:
        sleep = sleep_s(spec)
        if drain <= 0:
            yield f"{_DRAIN} must be above 0, or SIGTERM cuts open streams"
        if isinstance(spec, Workers) and drain <= graceful:
            yield f"{_DRAIN} {drain:g} must be above Serve's graceful shutdown of {graceful:g} s"
        if sleep + drain + _TO_END_S > grace:
            yield (
                f"preStop {sleep} s + drain {drain:g} s + {_TO_END_S} s to end do not fit into a grace period of "
                f"{grace} s"
            )
    if grace > _EVICTION_S and spec.template.metadata.annotations.get(SAFE_TO_EVICT) != "false":
        yield (
            f"a grace period of {grace} s: the cluster autoscaler gives a pod {_EVICTION_S} s, and then cuts its "
            f'streams, unless it is told to leave the node: annotation {SAFE_TO_EVICT}: "false"'
        )
    if _HARD_STOP in seconds and seconds[_HARD_STOP] <= longest:
        yield f"{_HARD_STOP} {seconds[_HARD_STOP]:g} cuts requests of {longest:g} s when HAProxy is replaced"


def upgrades(service: RayService, file: ServeFile) -> Iterator[str]:
    """The old cluster of an upgrade is there until its last stream has ended."""
    delay, longest = service.spec.ray_cluster_deletion_delay_seconds, file.app.limits.max_request_seconds
    if delay <= longest:
        yield f"rayClusterDeletionDelaySeconds {delay} must be above limits.max_request_seconds {longest:g}"


def graceful_shutdown_s(app: AppConfig) -> float:
    """Seconds Serve lets a replica or an ingress finish, whichever has longer, from what builds them."""
    from deployment.app import ingress_options, replica_options

    return max(float(options(app)["graceful_shutdown_timeout_s"]) for options in (replica_options, ingress_options))
