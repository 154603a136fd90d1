"""Tools that know more and may not be there: another linter, Kubernetes' own schemas, and Prometheus' test runner."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from k8s_check.monitoring import queries
from k8s_check.render import KUBECTL_VARIABLE, ROOT, Object

LINTER_VARIABLE: Final = "ORCA_K8SLINT"
PROMTOOL_VARIABLE: Final = "ORCA_PROMTOOL"
KUBERNETES: Final = "1.35"
"""Version whose schemas core objects are held against."""
MONITORING: Final = ROOT / "k8s" / "components" / "monitoring"
_CORE_GROUPS: Final = frozenset(
    {
        "apps", "autoscaling", "batch", "extensions", "policy",
        *(f"{each}.k8s.io" for each in (
            "admissionregistration", "apiextensions", "apiregistration", "authentication", "authorization",
            "certificates", "coordination", "discovery", "events", "flowcontrol.apiserver", "internal.apiserver",
            "networking", "node", "rbac.authorization", "resource", "scheduling", "storage", "storagemigration",
        )),
    }
)  # fmt: skip
"""Of Kubernetes itself. Other groups end in k8s.io as well: snapshots, the vertical autoscaler, the Gateway API."""


class MissingToolError(Exception):
    """A tool is not there; the text says which, and how to name one."""


def wrong_tools() -> list[str]:
    """Variables that name a program or script that is not there."""
    variables = (KUBECTL_VARIABLE, PROMTOOL_VARIABLE, LINTER_VARIABLE)
    named = [(each, os.environ[each]) for each in variables if os.environ.get(each)]
    return [
        f"{variable}={path}: there is no such {'script' if variable == LINTER_VARIABLE else 'program'}"
        for variable, path in named
        if not (Path(path).is_file() if variable == LINTER_VARIABLE else shutil.which(path))
    ]


def is_custom(each: Object) -> bool:
    """Whether the kind comes from neither Kubernetes nor KubeRay."""
    group = str(each.get("apiVersion")).rpartition("/")[0]
    return "." in group and group != "ray.io" and group not in _CORE_GROUPS


def core_problems(objects: list[Object]) -> list[str]:
    """What Kubernetes' schemas say of core objects. Raises ``MissingToolError`` without kubernetes-validate."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        raise MissingToolError("kubernetes-validate is not installed (k8s/requirements.txt)")
    library: Any = importlib.import_module("kubernetes_validate")
    problems = []
    for each in objects:
        if is_custom(each) or str(each.get("apiVersion")).startswith("ray.io/"):
            continue
        name = f"{each['kind']}/{(each.get('metadata') or {}).get('name')}"
        try:
            library.validate({"apiVersion": "", **each}, KUBERNETES, strict=True)
        except library.ValidationError as error:
            problems.append(f"{name}: {'.'.join(map(str, error.path))}: {error.message}")
        except library.SchemaNotFoundError:
            problems.append(
                f"{name}: Kubernetes {KUBERNETES} knows no such kind in apiVersion {each.get('apiVersion')}"
            )
    return problems


def linter_problems(objects: list[Object]) -> list[str]:
    """What the linter named by ``$ORCA_K8SLINT`` says. Raises ``MissingToolError`` where none is named."""
    path = os.environ.get(LINTER_VARIABLE)
    if not path:
        raise MissingToolError(f"no k8slint ({LINTER_VARIABLE}=PATH names one)")
    text = yaml.safe_dump_all([each for each in objects if not is_custom(each)])
    done = subprocess.run(
        [sys.executable, path, "--k8s", KUBERNETES, "-"], input=text, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines() if done.returncode != 0 else []


def alert_problems() -> list[str]:
    """What promtool says of the alerts and their tests. Raises ``MissingToolError`` without promtool."""
    promtool = _promtool()
    with tempfile.TemporaryDirectory() as folder:
        rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
        (Path(folder) / "rules.yaml").write_text(yaml.safe_dump(rules))
        shutil.copy(MONITORING / "alerts.test.yaml", folder)
        return [*_run(promtool, folder, "check", "rules.yaml"), *_run(promtool, folder, "test", "alerts.test.yaml")]


def rule_problems(objects: list[Object]) -> list[str]:
    """What promtool says of the rules as they were rendered, and of what dashboards ask for.

    Raises ``MissingToolError`` without promtool.
    """
    promtool = _promtool()
    said: list[str] = []
    for each in objects:
        groups = _groups(each)
        if groups:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
                name = f"{each['kind']}/{each['metadata']['name']}"
                said += [f"{name}: {line}" for line in _run(promtool, folder, "check", "rules.yaml")]
    return said


def _groups(each: Object) -> list[dict[str, Any]]:
    """Groups of rules of an object; each expression of a dashboard as a rule of its own."""
    if each["kind"] == "PrometheusRule":
        return list(each["spec"].get("groups") or [])
    if each["kind"] != "ConfigMap":
        return []
    asked = {_without_variables(text): None for text in queries(each) if "ray_" in text}
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(asked)]
    return [{"name": "dashboard", "rules": rules}] if rules else []


def _without_variables(text: str) -> str:
    """Grafana's: an interval where it stands between brackets, any text elsewhere."""
    text = re.sub(r"\[\$\{?\w+\}?", "[5m", text)
    return re.sub(r"\$\{?\w+(:\w+)?\}?", "x", text)


def _promtool() -> str:
    promtool = shutil.which(os.environ.get(PROMTOOL_VARIABLE) or "promtool")
    if promtool is None:
        raise MissingToolError(f"no promtool ({PROMTOOL_VARIABLE}=PATH names one; Debian: prometheus)")
    return str(Path(promtool).absolute())


def _run(promtool: str, folder: str, verb: str, file: str) -> Iterator[str]:
    done = subprocess.run([promtool, verb, "rules", file], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield from (done.stdout + done.stderr).strip().splitlines()
