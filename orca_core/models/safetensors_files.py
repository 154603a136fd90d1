"""Weights from a folder with one safetensors file, or with shards and their index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from orca_core.errors import ModelLoadError
from orca_core.models.hf_config import read_json
from orca_core.models.pages import drop_pages, row_pieces
from orca_core.quantised import QuantisedWeight
from orca_core.source import ModelSource

_INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final[Mapping[str, str]] = MappingProxyType({"F32": "float32", "BF16": "bfloat16", "F16": "float16"})


class SafetensorsCheckpoint:
    """A ``Checkpoint`` over memory-mapped files: a tensor's pages are read when it is loaded.

    Raises ``ModelLoadError`` where a file is missing or damaged, or holds a tensor that is not of a floating dtype.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source.name
        self._handles: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._files = _weight_files(source)
        for file in self._files:
            self._open(file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint``."""
        return self._shapes

    def stored_dtype(self) -> str:
        """The widest dtype among the tensors."""
        present = set(self._dtypes.values())
        if len(present) == 1:
            return present.pop()
        return "float32"

    def load(self, name: str) -> torch.Tensor:
        """See ``Checkpoint``."""
        try:
            tensor: torch.Tensor = self._handles[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(self._source, f"cannot read tensor {name}: {error}") from error
        return tensor

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """See ``Checkpoint``."""
        tensor = self.load(name)
        for rows in row_pieces(tuple(tensor.shape)):
            piece = tensor[rows]
            yield piece
            drop_pages(piece.data_ptr(), piece.nbytes)

    def files(self) -> list[Path]:
        """See ``Checkpoint``."""
        return self._files

    def quantised(self, name: str, dtype: torch.dtype) -> QuantisedWeight | None:
        """See ``Checkpoint``."""
        return None

    def _open(self, file: Path) -> None:
        try:
            handle: Any = safe_open(file, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._handles:
                    raise ModelLoadError(self._source, f"tensor {name} is in two files")
                entry = handle.get_slice(name)
                dtype = str(entry.get_dtype())
                if dtype not in _DTYPES:
                    raise ModelLoadError(self._source, f"tensor {name} has dtype {dtype}; known: {', '.join(_DTYPES)}")
                self._handles[name] = handle
                self._dtypes[name] = _DTYPES[dtype]
                self._shapes[name] = tuple(entry.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(self._source, f"cannot read {file.name}: {error}") from error


def _weight_files(source: ModelSource) -> list[Path]:
    """The files that make up the checkpoint, by the rules of transformers: the single file wins over an index."""
    single, index = source.folder / "model.safetensors", source.folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(source.folder.glob("*.safetensors"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found)
            raise ModelLoadError(source.name, f"several safetensors files but no {_INDEX}: {names}")
        return found
    weight_map = read_json(source.name, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(source.name, f"{_INDEX} has no weight_map")
    files: list[Path] = []
    for name in sorted(set(map(str, weight_map.values()))):
        # the index comes with the model: it must not be able to point outside its folder
        if Path(name).name != name or not _is_file(source.folder / name):
            raise ModelLoadError(source.name, f"{_INDEX} names {name!r}, which is not in the folder")
        files.append(source.folder / name)
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is longer than names can be
        return False
