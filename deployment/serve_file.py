"""One YAML file for everything: a Ray Serve config whose ``args`` are an ``AppConfig``. Reading needs no Ray.

The same text is taken by ``orca-serve up``, ``serve run``, ``serve deploy`` and a KubeRay ``serveConfigV2``.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import yaml

from deployment.config import AppConfig, unknown_key
from orca_core.errors import ConfigError

IMPORT_PATH: Final = "deployment.app:build"
DEFAULT_CONFIG: Final = "local-cpu.yaml"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_HTTP_PORT: Final = 8000
DEFAULT_GRPC_PORT: Final = 9000
APP_PATH: Final = "applications.0"

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
SERVICERS: Final = (
    "deployment.grpc_api.add_orca_service", "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)  # fmt: skip
"""What ``grpc_options.grpc_servicer_functions`` must name: our service, and the standard health service beside it."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A validated Serve config file. ``document``: the plain mapping Serve takes; never changed in place."""

    document: dict[str, Any]
    app: AppConfig

    @property
    def app_name(self) -> str:
        """Name of the application in Serve."""
        return str(self.document["applications"][0].get("name", "default"))

    @property
    def host(self) -> str:
        """Address the HTTP face listens on."""
        return str((self.document.get("http_options") or {}).get("host", DEFAULT_HOST))

    @property
    def http_port(self) -> int:
        """TCP port of the HTTP face."""
        return int((self.document.get("http_options") or {}).get("port", DEFAULT_HTTP_PORT))

    @property
    def grpc_port(self) -> int:
        """TCP port of the gRPC face."""
        return int((self.document.get("grpc_options") or {}).get("port", DEFAULT_GRPC_PORT))

    def with_overrides(
        self,
        *,
        model: str | None = None,
        replicas: int | None = None,
        host: str | None = None,
        http_port: int | None = None,
        grpc_port: int | None = None,
        api_keys_file: str | None = None,
    ) -> ServeFile:
        """A copy with the values a command line gave; ``None`` keeps the file's. Raises ``ConfigError``."""
        document = copy.deepcopy(self.document)
        http_options = _section(document, "http_options")
        grpc_options = _section(document, "grpc_options")
        http_options["host"] = self.host if host is None else host
        http_options["port"] = self.http_port if http_port is None else http_port
        grpc_options["port"] = self.grpc_port if grpc_port is None else grpc_port
        args = _section(document["applications"][0], "args")
        if model is not None:
            args["model"] = {**(args.get("model") or {}), "source": model, "id": ""}
        if replicas is not None:
            args["replicas"] = {**(args.get("replicas") or {}), "min": replicas, "max": replicas, "initial": replicas}
        if api_keys_file is not None:
            args["auth"] = {**(args.get("auth") or {}), "api_keys_file": api_keys_file}
        return serve_file(document)


def packaged_config(name: str) -> str:
    """Text of a config that comes with the installation (``local-cpu.yaml``), from a wheel as from a checkout.

    A wheel carries the checkout's ``configs/`` as ``deployment/configs/``. Raises ``ConfigError`` for other names.
    """
    for folder in _config_folders():
        candidate = folder / name
        if "/" not in name and candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    raise ConfigError("config", f"no packaged config {name!r}; there are: {', '.join(packaged_config_names())}")


def packaged_config_names() -> tuple[str, ...]:
    """Names of the configs that come with the installation."""
    for folder in _config_folders():
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
        if names:
            return tuple(names)
    return ()


def load_serve_file(source: str | Path) -> ServeFile:
    """Read and validate a Serve config file: a path, or the name of a packaged config, with or without .yaml.

    Raises ``ConfigError``.
    """
    path = Path(source)
    if not path.exists():
        for name in (str(source), f"{source}.yaml"):
            if name in packaged_config_names():
                return parse_serve_text(packaged_config(name))
    try:
        return parse_serve_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError("config", f"cannot read {str(path)!r}: {reason}") from None


def load_app_config(path_or_text: str | Path) -> AppConfig:
    """The ``AppConfig`` of a Serve config file; a string with a line break is the text itself.

    Raises ``ConfigError``.
    """
    if isinstance(path_or_text, str) and "\n" in path_or_text:
        return parse_serve_text(path_or_text).app
    return load_serve_file(path_or_text).app


def parse_serve_text(text: str) -> ServeFile:
    """Validate the text of a Serve config file. Raises ``ConfigError``."""
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError("config", f"is not valid YAML: {where}{error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ConfigError("config", "is not valid YAML") from None
    if not isinstance(document, dict):
        raise ConfigError("config", "must be a mapping with 'applications'")
    return serve_file(document)


def serve_file(document: dict[str, Any]) -> ServeFile:
    """Validate the mapping of a Serve config file. Raises ``ConfigError``."""
    for key in document:
        if key not in _DOCUMENT_KEYS:
            raise unknown_key(str(key), str(key), list(_DOCUMENT_KEYS))
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications", "must be a list with one application")
    application = applications[0]
    for key in application:
        if key not in _APPLICATION_KEYS:
            raise unknown_key(f"{APP_PATH}.{key}", str(key), list(_APPLICATION_KEYS))
    if application.get("import_path") != IMPORT_PATH:
        raise ConfigError(f"{APP_PATH}.import_path", f"must be {IMPORT_PATH}")
    args = application.get("args")
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError(f"{APP_PATH}.args", "must be a mapping")
    for name in ("http_options", "grpc_options"):
        _check_port(document, name)
    _check_servicers(document)
    app = AppConfig.parse(args)
    _check_by_serve(document)
    return ServeFile(document, app)


def _check_port(document: dict[str, Any], name: str) -> None:
    options = document.get(name)
    if options is None:
        return
    if not isinstance(options, dict):
        raise ConfigError(name, "must be a mapping")
    for key in options:  # Serve ignores what it does not know
        if key not in _OPTION_KEYS[name]:
            raise unknown_key(f"{name}.{key}", str(key), list(_OPTION_KEYS[name]))
    port = options.get("port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535):
        raise ConfigError(f"{name}.port", "must be an integer from 1 to 65535")


def _check_servicers(document: dict[str, Any]) -> None:
    """GRPC answers UNIMPLEMENTED to everything whose servicer is not named, and Serve says nothing."""
    options = document.get("grpc_options")
    named = options.get("grpc_servicer_functions") if options else None
    if options and SERVICERS[0] not in (named or ()):
        raise ConfigError("grpc_options.grpc_servicer_functions", f"must list {' and '.join(SERVICERS)}")


def _check_by_serve(document: dict[str, Any]) -> None:
    """Let Serve's own schema have the last word where Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        return
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        message = str(first["msg"]).replace("\n", " ").removeprefix("Value error, ")
        raise ConfigError(".".join(str(part) for part in first["loc"]) or "config", message) from None


def _section(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping under ``name``, made where there is none."""
    if not isinstance(mapping.get(name), dict):
        mapping[name] = {}
    section: dict[str, Any] = mapping[name]
    return section


def _config_folders() -> list[Traversable]:
    package = resources.files("deployment")
    checkout = Path(__file__).resolve().parent.parent / "configs"
    return [folder for folder in (package / "configs", checkout) if folder.is_dir()]


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML where a key given twice is an error, not the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    problem = f"key {key!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)
