"""``orca-serve up`` before it starts anything: ports, models, keys and paths. Starting Ray is tested end to end."""

from __future__ import annotations

import socket
from importlib import import_module
from pathlib import Path

import pytest

from deployment.serve_file import load_serve_file
from orca_core.config import EMBEDDED_MODEL
from tests.core.tiny_models import tiny_llama
from tests.deployment.cli_rig import run

up_module = import_module("deployment.cli.up")


@pytest.mark.model
def test_up_says_which_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        status, out, err = run(capsys, "up", "--http-port", str(port))
    assert (status, out) == (1, "")
    assert (
        err == f"orca-serve: http_options.port: 127.0.0.1:{port}: Address already in use; --http-port chooses another\n"
    )


def test_up_refuses_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (first, second)]
    status, out, err = run(capsys, "up", "--model", "nothing-here", "--http-port", ports[0], "--grpc-port", ports[1])
    assert (status, out) == (2, "")
    assert err.startswith("orca-serve: model.source: 'nothing-here': there is no such file or folder")


@pytest.mark.parametrize(
    ("host", "with_keys", "warns"),
    [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False), ("localhost", False, False)],
)
def test_up_warns_of_an_open_door(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str, with_keys: bool, warns: bool
) -> None:
    (tmp_path / "keys").write_text("sk-right\n")
    keys = str(tmp_path / "keys") if with_keys else None
    up_module._say_next(load_serve_file("local-cpu").with_overrides(host=host, api_keys_file=keys))
    said = capsys.readouterr().err
    assert ("without API keys" in said) == warns
    assert ("--api-key KEY" in said) == with_keys


def test_up_hands_on_paths_that_replicas_and_ingress_will_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("sk-right\n")
    tiny_llama().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    file = up_module._ready_here(load_serve_file("local-cpu").with_overrides(model="tiny", api_keys_file="keys"))
    assert file.app.auth.api_keys_file == str(tmp_path / "keys")
    assert (file.app.model.source, file.app.model.id) == (str(tmp_path / "tiny"), "tiny")
    (tmp_path / EMBEDDED_MODEL).mkdir()
    assert up_module._absolute(EMBEDDED_MODEL) == EMBEDDED_MODEL, "a folder of that name is not what is loaded"
