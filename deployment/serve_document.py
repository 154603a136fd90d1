"""The mapping Serve takes, all but its ``args``: which keys there are, and what is wrong with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deployment.config_problems import unknown_key
from orca_core.errors import ConfigError

IMPORT_PATH: Final = "deployment.app:build"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORTS: Final = {"http_options": 8000, "grpc_options": 9000}
APP_PATH: Final = "applications.0"
SERVICERS: Final = (
    "deployment.grpc_api.add_orca_service", "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)  # fmt: skip
"""What ``grpc_options.grpc_servicer_functions`` must name: our service, and the standard health service beside it."""

_DOCUMENT_KEYS: Final = (
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
    "applications", "target_capacity",
)  # fmt: skip
_APPLICATION_KEYS: Final = (
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy", "args",
    "logging_config", "external_scaler_enabled",
)  # fmt: skip
_OPTION_KEYS: Final = {
    "http_options": (
        "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
        "ssl_keyfile_password", "ssl_ca_certs",
    ),
    "grpc_options": ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"),
}  # fmt: skip


def port_of(document: Mapping[str, Any], face: str) -> Any:
    """The port of ``http_options`` or ``grpc_options``, or its default. An integer in a valid document."""
    options = document.get(face)
    port = options.get("port") if isinstance(options, Mapping) else None
    return DEFAULT_PORTS[face] if port is None else port


def document_problems(document: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Everything that is wrong outside of ``args``. Serve itself ignores keys it does not know."""
    for key in document:
        if key not in _DOCUMENT_KEYS:
            yield unknown_key(str(key), str(key), list(_DOCUMENT_KEYS))
    yield from _application_problems(document.get("applications"))
    for face in _OPTION_KEYS:
        yield from _face_problems(document, face)
    yield from _servicer_problems(document)
    port = port_of(document, "http_options")
    if port == port_of(document, "grpc_options"):
        yield ConfigError("grpc_options.port", f"must differ from http_options.port ({port})")


def serve_problems(document: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What Serve's own schema has against it; nothing where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        for each in error.errors(include_url=False, include_context=False):
            message = str(each["msg"]).replace("\n", " ").removeprefix("Value error, ")
            yield ConfigError(".".join(str(part) for part in each["loc"]) or "config", message)


def _application_problems(applications: object) -> Iterator[ConfigError]:
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        yield ConfigError("applications", "must be a list with one application")
        return
    application = applications[0]
    for key in application:
        if key not in _APPLICATION_KEYS:
            yield unknown_key(f"{APP_PATH}.{key}", str(key), list(_APPLICATION_KEYS))
    if application.get("import_path") != IMPORT_PATH:
        yield ConfigError(f"{APP_PATH}.import_path", f"must be {IMPORT_PATH}")
    args = application.get("args")
    if args is not None and not isinstance(args, Mapping):
        yield ConfigError(f"{APP_PATH}.args", "must be a mapping")


def _face_problems(document: Mapping[str, Any], face: str) -> Iterator[ConfigError]:
    options = document.get(face)
    if options is None:
        return
    if not isinstance(options, Mapping):
        yield ConfigError(face, "must be a mapping")
        return
    for key in options:
        if key not in _OPTION_KEYS[face]:
            yield unknown_key(f"{face}.{key}", str(key), list(_OPTION_KEYS[face]))
    port = options.get("port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535):
        yield ConfigError(f"{face}.port", "must be an integer from 1 to 65535")


def _servicer_problems(document: Mapping[str, Any]) -> Iterator[ConfigError]:
    """GRPC answers UNIMPLEMENTED to everything whose servicer is not named, and Serve says nothing."""
    options = document.get("grpc_options")
    if not options or not isinstance(options, Mapping):
        return
    named = options.get("grpc_servicer_functions")
    if not isinstance(named, list) or SERVICERS[0] not in named:
        yield ConfigError("grpc_options.grpc_servicer_functions", f"must list {' and '.join(SERVICERS)}")
