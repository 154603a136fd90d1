"""docs/ray-cluster.md against what it speaks of: Ray's own schema, and what the nodes of a cluster have to be told."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from k8s_check.facts import SERVE_ENVIRONMENT, read_facts

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ray-cluster.md").read_text()
TOLD = {**SERVE_ENVIRONMENT, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "330"}


def cluster_file() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def test_the_cluster_file_is_what_ray_up_takes() -> None:
    validate_config(prepare_config(cluster_file()))


def test_its_image_is_the_one_that_is_built() -> None:
    assert cluster_file()["docker"]["image"].endswith(f"/orca-serve:{read_facts(ROOT).tag}")


def test_every_node_is_told_the_same_by_hand_and_by_ray_up() -> None:
    exported = dict(re.findall(r'^export (RAY_SERVE_\w+)="?([^"#\n]*?)"?(?: +#.*)?$', TEXT, re.MULTILINE))
    options = " ".join(cluster_file()["docker"]["run_options"])
    passed = dict(re.findall(r'--env "?(RAY_SERVE_\w+)=((?<=RETRY_ON=)[^"]+|\S+)', options))
    assert exported.pop("RAY_SERVE_HAPROXY_BINARY_PATH") == "${haproxy:?orca-haproxy is not on the PATH}"
    assert passed.pop("RAY_SERVE_HAPROXY_BINARY_PATH") == "/usr/local/bin/orca-haproxy"
    assert exported == TOLD
    assert passed == TOLD


def test_a_missing_haproxy_is_no_empty_variable() -> None:
    lines = re.findall(r"^(?:haproxy=|export RAY_SERVE_HAPROXY_BINARY_PATH).*$", TEXT, re.MULTILINE)
    ended = subprocess.run(
        ["/bin/bash", "-c", "\n".join(lines)], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert len(lines) == 2
    assert (ended.returncode, "orca-haproxy is not on the PATH" in ended.stderr) == (127, True)


def test_the_tests_that_the_docs_name_are_there() -> None:
    named = {
        (path, name)
        for page in (ROOT / "docs").glob("*.md")
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    }
    assert len(named) > 10
    assert not [
        (path, name)
        for path, name in named
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
