"""Serve config files: the packaged ones, overrides, and what is wrong with a document beside our part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment import serve_document
from deployment.serve_document import SERVICERS
from deployment.serve_file import (
    load_app_config,
    load_serve_file,
    packaged_config,
    packaged_config_names,
    parse_serve_text,
    serve_file,
)
from orca_core.errors import ConfigError

MINIMAL: dict[str, Any] = {"applications": [{"import_path": "deployment.app:build", "args": {}}]}


@pytest.mark.parametrize("name", ["local-cpu.yaml", "one-gpu.yaml", "fleet.yaml", "cluster-cpu.yaml"])
def test_packaged_configs(name: str) -> None:
    assert name in packaged_config_names()
    file = load_serve_file(name)
    assert file.document["grpc_options"]["grpc_servicer_functions"]
    assert load_app_config(packaged_config(name)) == file.app
    assert (file.http_port, file.grpc_port) == (8000, 9000)


def test_local_cpu_is_what_the_readme_says() -> None:
    file = load_serve_file("local-cpu.yaml")
    assert (file.host, file.app_name) == ("127.0.0.1", "orca")
    assert (file.app.replicas.start, file.app.replicas.num_gpus) == (2, 0)


def test_overrides_leave_the_original_alone() -> None:
    file = load_serve_file("local-cpu.yaml")
    before = yaml.safe_dump(file.document)
    other = file.with_overrides(model="./x/tiny", replicas=3, host="0.0.0.0", http_port=1, grpc_port=2)
    assert yaml.safe_dump(file.document) == before
    assert (other.app.model.id, other.app.replicas.min, other.app.replicas.max) == ("tiny", 3, 3)
    assert (other.host, other.http_port, other.grpc_port) == ("0.0.0.0", 1, 2)
    assert file.with_overrides(model="./x/tiny", model_id="mine").app.model.id == "mine"
    assert serve_file(MINIMAL).with_overrides(grpc_port=2).grpc_port == 2, "the servicers go without saying"
    assert file.with_overrides(api_keys_file="/keys").app.auth.api_keys_file == "/keys"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"aplications": []}, "aplications"),
        ({"applications": []}, "applications"),
        ({"applications": [{"import_path": "other:build"}]}, "applications.0.import_path"),
        ({"applications": [{"import_path": "deployment.app:build", "args": 3}]}, "applications.0.args"),
        ({"http_options": {"port": 70000}}, "http_options.port"),
        ({"grpc_options": {"port": "x"}}, "grpc_options.port"),
        ({"grpc_options": []}, "grpc_options"),
    ],
)
def test_bad_serve_documents(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_text(yaml.safe_dump({**MINIMAL, **change}))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "a: 1\na: 2\n", "a: !!python/object:os.system {}\n"])
def test_bad_yaml(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_text(text)
    assert caught.value.field == "config"
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_serve_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_serve_file(tmp_path)


def test_the_known_options_are_those_of_serve() -> None:
    """Serve ignores what it does not know; our lists must follow it."""
    from ray.serve import schema

    for name, kind in (("http_options", schema.HTTPOptionsSchema), ("grpc_options", schema.gRPCOptionsSchema)):
        assert set(serve_document._OPTION_KEYS[name]) == set(kind.model_fields)
    assert set(serve_document._APPLICATION_KEYS) == set(schema.ServeApplicationSchema.model_fields)


@pytest.mark.parametrize(("old", "new", "field"), [
    ("  host:", "  hots:", "http_options.hots"),
    ("    route_prefix:", "    rout_prefix:", "applications.0.rout_prefix"),
    ("    - deployment.grpc_api.add_orca_service\n", "", "grpc_options.grpc_servicer_functions"),
    ("max_batch_size: 16", 'max_batch_size: "16"', "engine.max_batch_size"),
])  # fmt: skip
def test_what_serve_would_swallow(old: str, new: str, field: str) -> None:
    text = packaged_config("local-cpu.yaml")
    assert old in text
    with pytest.raises(ConfigError) as caught:
        parse_serve_text(text.replace(old, new))
    assert caught.value.field == field


def test_a_packaged_config_needs_no_suffix() -> None:
    assert load_serve_file("local-cpu") == load_serve_file("local-cpu.yaml")


def test_the_file_and_its_arguments_are_checked_together() -> None:
    text = yaml.safe_dump({
        "zzz": 1, "http_options": {"port": 9000, "hots": "x"}, "grpc_options": {"port": "x"},
        "applications": [{"import_path": "other:build", "args": {"engine": {"device": "tpu"}}}],
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        parse_serve_text(text)
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {
        "zzz", "http_options.hots", "grpc_options.port", "grpc_options.grpc_servicer_functions",
        "applications.0.import_path", "engine.device",
    }  # fmt: skip


@pytest.mark.parametrize("options", [{"http_options": {"port": 9000}}, {"grpc_options": {"port": 8000}}])
def test_the_two_faces_need_two_ports(options: dict[str, Any]) -> None:
    document = {**MINIMAL, "grpc_options": {"grpc_servicer_functions": list(SERVICERS)}}
    document |= {name: {**(document.get(name) or {}), **values} for name, values in options.items()}
    with pytest.raises(ConfigError) as caught:
        parse_serve_text(yaml.safe_dump(document))
    assert caught.value.field == "grpc_options.port"
    assert "must differ from http_options.port" in caught.value.reason
    with pytest.raises(ConfigError, match="must differ"):
        load_serve_file("local-cpu").with_overrides(http_port=9000)


def test_a_wrong_name_of_a_packaged_config_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"local-cpu\.yaml"):
        load_serve_file("local-gpu")


def test_serve_has_its_say_beside_ours() -> None:
    """Each field once, and nothing of Serve's about what we have refused already."""
    document = {
        **MINIMAL, "proxy_location": "Nowhere", "http_options": {"port": "x", "keep_alive_timeout_s": "long"},
        "applications": [{**MINIMAL["applications"][0], "route_prefix": 3, "args": {"zzz": 1}}],
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        serve_file(document)
    assert sorted(problem.field for problem in caught.value.problems) == [
        "applications.0.route_prefix",
        "http_options.keep_alive_timeout_s",
        "http_options.port",
        "proxy_location",
        "zzz",
    ]
