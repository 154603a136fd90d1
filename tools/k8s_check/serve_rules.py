"""What else a Serve config may say that does not fit: time limits, overrides, files that are not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from deployment.serve_document import SERVICERS
from deployment.serve_file import ServeFile
from k8s_check.kuberay import is_our_image
from k8s_check.ray_shapes import Group, RayService, Workers
from k8s_check.room import replicas_on

_OURS: Final = ("autoscaling_config", "graceful_shutdown_timeout_s", "num_replicas")
_OF_SERVE: Final = {"num_cpus": 1.0, "num_gpus": 0.0}
"""What an actor has where its options do not say."""
_FACES: Final = ("http_options", "grpc_options")


def time_limits(_: RayService, file: ServeFile) -> Iterator[str]:
    """Serve's own limit would end requests that ours lets go on."""
    longest = file.app.limits.max_request_seconds
    for face in _FACES:
        limit = (file.document.get(face) or {}).get("request_timeout_s")
        if limit is not None and 0 < limit < longest:
            yield f"serveConfigV2: {face}.request_timeout_s {limit} cuts requests of {longest:g} s"


def servicers(_: RayService, file: ServeFile) -> Iterator[str]:
    """The health service, which gateways and gRPC clients ask."""
    named = (file.document.get("grpc_options") or {}).get("grpc_servicer_functions") or []
    for each in SERVICERS:
        if named and each not in named:
            yield f"serveConfigV2: grpc_options.grpc_servicer_functions lacks {each}"


def overrides(_: RayService, file: ServeFile) -> Iterator[str]:
    """A deployment's own section wins over what follows from ``args``, and the sums here are made with those."""
    from deployment.app import ingress_options, replica_options

    ours = {str(options["name"]): options for options in (replica_options(file.app), ingress_options(file.app))}
    for each in file.document["applications"][0].get("deployments") or []:
        name = str(each.get("name"))
        if name not in ours:
            yield f"serveConfigV2: deployments: none is called {name!r}; there are {' and '.join(ours)}"
            continue
        for key in _OURS:
            if key in each and each[key] != ours[name].get(key):
                yield f"serveConfigV2: deployments: {name}.{key} overrides what follows from args: say it there"
        if each.get("ray_actor_options") is not None:
            yield from _actor_options(name, each["ray_actor_options"], ours[name]["ray_actor_options"])


def _actor_options(name: str, given: Mapping[str, Any], ours: Mapping[str, float]) -> Iterator[str]:
    for key, of_serve in _OF_SERVE.items():
        has, wanted = of_serve if given.get(key) is None else given[key], ours.get(key, 0.0)
        if has != wanted:
            yield (
                f"serveConfigV2: deployments: {name}.ray_actor_options replaces all of them: {key} is {has:g}, "
                f"args say {wanted:g}"
            )


def files(service: RayService, file: ServeFile) -> Iterator[str]:
    """Keys and certificates are mounted wherever there is a proxy, and a model's folder wherever there is a replica.

    The image that `make image` builds has none of them; an image of one's own may.
    """
    http, args = file.document.get("http_options") or {}, file.document["applications"][0].get("args") or {}
    wanted = {f"http_options.{key}": http.get(key) for key in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    wanted["auth.api_keys_file"] = (args.get("auth") or {}).get("api_keys_file")  # said there; not of our environment
    for group, spec in service.groups():
        if not is_our_image(spec.container.image):
            continue
        for key, path in wanted.items():
            if path and not _mounted(spec, path):
                yield f"{group}: serveConfigV2: {key} {path}: nothing is mounted there"
        source, reads = file.app.model.source, isinstance(spec, Workers) and replicas_on(spec, file.app) > 0
        if reads and source.startswith("/") and not _mounted(spec, source):
            yield f"{group}: serveConfigV2: model.source {source}: nothing is mounted there"


def _mounted(spec: Group, path: str) -> bool:
    return any(PurePosixPath(path).is_relative_to(mount.mount_path) for mount in spec.container.volume_mounts)
