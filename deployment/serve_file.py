"""One YAML file for everything: a Ray Serve config whose ``args`` are an ``AppConfig``. Reading needs no Ray.

The same text is taken by ``orca-serve up``, ``serve run``, ``serve deploy`` and a KubeRay ``serveConfigV2``.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import yaml

from deployment.config import AppConfig
from deployment.config_problems import config_errors
from deployment.serve_document import DEFAULT_HOST, SERVICERS, document_problems, port_of, serve_problems
from orca_core.errors import ConfigError

DEFAULT_CONFIG: Final = "local-cpu.yaml"


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
        return int(port_of(self.document, "http_options"))

    @property
    def grpc_port(self) -> int:
        """TCP port of the gRPC face."""
        return int(port_of(self.document, "grpc_options"))

    def with_overrides(
        self,
        *,
        model: str | None = None,
        model_id: str | None = None,
        replicas: int | None = None,
        host: str | None = None,
        http_port: int | None = None,
        grpc_port: int | None = None,
        api_keys_file: str | None = None,
    ) -> ServeFile:
        """A copy with the values a command line gave; ``None`` keeps the file's. Raises ``ConfigError``."""
        document = copy.deepcopy(self.document)
        http_options = _section(document, "http_options")
        if not document.get("grpc_options"):
            document["grpc_options"] = {"grpc_servicer_functions": list(SERVICERS)}
        grpc_options = _section(document, "grpc_options")
        http_options["host"] = self.host if host is None else host
        http_options["port"] = self.http_port if http_port is None else http_port
        grpc_options["port"] = self.grpc_port if grpc_port is None else grpc_port
        args = _section(document["applications"][0], "args")
        if model is not None:
            args["model"] = {**(args.get("model") or {}), "source": model, "id": model_id or ""}
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
    except UnicodeDecodeError:
        raise ConfigError("config", f"cannot read {str(path)!r}: is not UTF-8 text") from None
    except OSError as error:
        hint = "" if path.exists() else f"; packaged are: {', '.join(packaged_config_names())}"
        raise ConfigError("config", f"cannot read {str(path)!r}: {error.strerror}{hint}") from None


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
    """Validate the mapping of a Serve config file. Raises ``ConfigError``, with all that is wrong."""
    problems = list(document_problems(document))
    app: AppConfig | None = None
    try:
        app = AppConfig.parse(_args(document))
    except ConfigError as error:
        problems += error.problems
    ours = tuple(problem.field for problem in problems)
    problems += [problem for problem in serve_problems(document) if not _is_said(problem.field, ours)]
    if app is None or problems:
        raise config_errors(problems)
    return ServeFile(document, app)


def _is_said(field: str, said: tuple[str, ...]) -> bool:
    """Whether something was said of a field, of what holds it, or of a part of it."""
    return any(f"{field}.".startswith(f"{each}.") or f"{each}.".startswith(f"{field}.") for each in said)


def _args(document: dict[str, Any]) -> Mapping[str, Any]:
    """The ``args`` of the application, as far as there are any that could be looked at."""
    applications = document.get("applications")
    first = applications[0] if isinstance(applications, list) and applications else None
    args = first.get("args") if isinstance(first, Mapping) else None
    return args if isinstance(args, Mapping) else {}


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
