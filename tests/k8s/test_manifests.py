"""The overlays as they are: nothing wrong, the Serve config in them is the file of configs/, every metric is shown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deployment.metrics import SPECS
from k8s_check.checking import check_objects
from k8s_check.facts import NEEDED, Facts
from k8s_check.kuberay import tag_of
from k8s_check.monitoring import KNOWN_METRICS, metrics_in
from k8s_check.outside import (
    LINTER_VARIABLE,
    MONITORING,
    PROMTOOL_VARIABLE,
    MissingToolError,
    alert_problems,
    core_problems,
    linter_problems,
    rule_problems,
)
from k8s_check.render import COMPONENTS, ROOT, Object, RenderError, overlays, parse, render

CONFIGS = {"cpu": "cluster-cpu.yaml", "gpu": "fleet.yaml", "kind": "cluster-cpu.yaml"}
EVERY = [name + more for name in CONFIGS for more in ("", "+")]


def test_no_overlay_is_forgotten() -> None:
    assert [folder.name for folder in overlays()] == sorted(CONFIGS)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_wrong(name: str, rendered: Callable[[str], list[Object]], facts: Facts) -> None:
    assert check_objects(rendered(name), facts) == []


@pytest.mark.parametrize("name", EVERY)
def test_other_tools_agree(name: str, rendered: Callable[[str], list[Object]]) -> None:
    said, absent = [], []
    for tool in (core_problems, linter_problems):
        try:
            said += tool(rendered(name))
        except MissingToolError as error:
            absent.append(str(error))
    assert said == []
    if len(absent) == 2:
        pytest.skip("; ".join(absent))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_serve_config_is_the_file_itself(name: str, rendered: Callable[[str], list[Object]]) -> None:
    (service,) = [each for each in rendered(name) if each["kind"] == "RayService"]
    assert service["spec"]["serveConfigV2"] == (ROOT / "configs" / CONFIGS[name]).read_text()
    # and nothing is left of the ConfigMap it came from
    assert not [each for each in rendered(name) if each["metadata"]["name"].startswith("serve-config")]


@pytest.mark.parametrize("name", CONFIGS)
def test_images_are_of_this_version(name: str, rendered: Callable[[str], list[Object]], facts: Facts) -> None:
    images = re.findall(r"\S*orca-serve\S*:\d[^\s'\"]*", yaml.safe_dump_all(rendered(name)))
    assert images
    assert {tag_of(image) for image in images} == {facts.tag}


def test_the_serve_config_is_written_down_once() -> None:
    """No file under k8s/ holds a Serve config of its own."""
    holders = [path for path in (ROOT / "k8s").rglob("*") if path.is_file() and "import_path:" in path.read_text()]
    assert holders == []


def test_alerts_are_as_tested() -> None:
    try:
        assert alert_problems() == []
    except MissingToolError as error:
        pytest.skip(str(error))


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
    tests = yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in group["rules"]}
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_the_dashboard_shows_every_metric() -> None:
    board = json.loads((MONITORING / "orca-serve.json").read_text())
    shown = metrics_in(board)
    assert shown <= KNOWN_METRICS
    for spec in SPECS:
        assert any(metric.removeprefix("ray_").startswith(spec.name) for metric in shown), spec.name


def test_panels_neither_overlap_nor_share_an_id() -> None:
    panels = json.loads((MONITORING / "orca-serve.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_a_custom_kind_is_not_held_against_core_schemas(rendered: Callable[[str], list[Object]]) -> None:
    from k8s_check.outside import is_custom

    custom = {each["kind"] for each in rendered("gpu+") if is_custom(each)}
    assert custom == {"PodMonitor", "PrometheusRule", "Gateway", "HTTPRoute", "GRPCRoute"}


@pytest.mark.parametrize(
    ("api", "kind", "custom"),
    [
        ("snapshot.storage.k8s.io/v1", "VolumeSnapshot", True),
        ("autoscaling.k8s.io/v1", "VerticalPodAutoscaler", True),
        ("cert-manager.io/v1", "Certificate", True),
        ("policy/v1beta1", "PodDisruptionBudget", False),
        ("networking.k8s.io/v1", "NetworkPolicies", False),
        ("v1", "ConfigMpa", False),
    ],
)
def test_what_kubernetes_does_not_know(api: str, kind: str, custom: bool) -> None:
    from k8s_check.outside import is_custom

    each = {"apiVersion": api, "kind": kind, "metadata": {"name": "a"}, "spec": {}}
    assert is_custom(each) == custom
    try:
        said = core_problems([each])
    except MissingToolError as error:
        pytest.skip(str(error))
    assert said == ([] if custom else [f"{kind}/a: Kubernetes 1.35 knows no such kind in apiVersion {api}"])


def test_the_documentation_names_every_component_and_variable() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    for folder in COMPONENTS.iterdir():
        assert folder.name in text, folder.name
    operations = (ROOT / "docs" / "operations.md").read_text()
    for variable in NEEDED:
        assert variable in text + operations, variable


def test_the_documented_overlay_of_ones_own(kubectl: str, tmp_path: Path, facts: Facts) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"```yaml\n# my/kustomization.yaml.*?\n(.*?)```", text, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(example.replace("..", os.path.relpath(ROOT, tmp_path.resolve())))
    config = (ROOT / "configs" / "fleet.yaml").read_text().replace("max_batch_size: 256", "max_batch_size: 64")
    (tmp_path / "serve-config.yaml").write_text(config)
    objects = parse(render(kubectl, tmp_path))
    assert check_objects(objects, facts) == []
    (service,) = [each for each in objects if each["kind"] == "RayService"]
    assert service["spec"]["serveConfigV2"] == config


def test_the_documentation_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert named
    for path, function in named:
        assert (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), f"{path}::{function}"


def test_a_linter_is_asked_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rendered: Callable[[str], list[Object]]
) -> None:
    linter = tmp_path / "linter.py"
    linter.write_text("import sys; text = sys.stdin.read(); print(text.count('PodMonitor'), 'monitors'); sys.exit(1)")
    monkeypatch.setenv(LINTER_VARIABLE, str(linter))
    assert linter_problems(rendered("gpu")) == ["0 monitors"]  # what it has no schema for, it is not shown


def test_a_failure_to_render_is_told(kubectl: str, tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [gone.yaml]")
    with pytest.raises(RenderError, match=r"gone\.yaml"):
        render(kubectl, tmp_path)


def test_rules_are_shown_to_promtool_as_they_were_rendered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rendered: Callable[[str], list[Object]]
) -> None:
    promtool = tmp_path / "promtool"
    promtool.write_text("#!/bin/sh\ngrep -o 'record: query:0' $3; grep -c 'alert: OrcaNoReplica' $3; exit 1\n")
    promtool.chmod(0o755)
    monkeypatch.setenv(PROMTOOL_VARIABLE, str(promtool))
    said = rule_problems(rendered("gpu"))
    assert "PrometheusRule/orca-serve: 1" in said
    assert "ConfigMap/orca-dashboard: record: query:0" in said


def test_promtool_takes_every_query_of_the_dashboard(rendered: Callable[[str], list[Object]]) -> None:
    try:
        assert rule_problems(rendered("gpu")) == []
    except MissingToolError as error:
        pytest.skip(str(error))
