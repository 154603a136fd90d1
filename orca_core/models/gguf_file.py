"""Weights and configuration from a GGUF file, read and dequantised by the ``gguf`` library.

GGUF names and metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch

from orca_core.errors import ModelLoadError
from orca_core.models.config import ModelConfig
from orca_core.models.fields import Fields
from orca_core.models.gguf_blocks import FORMATS, read_blocks
from orca_core.models.gguf_config import DIVISORS, GgufFacts, read_gguf_config
from orca_core.models.layout import Layout
from orca_core.models.pages import drop_pages, row_pieces
from orca_core.models.registry import GGUF_ARCHITECTURES, find_architecture
from orca_core.models.tensors import expected_shapes
from orca_core.quantised import QuantisedWeight
from orca_core.source import ModelSource

_LONG_LISTS: Final = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))
GGUF_DTYPE: Final = "bfloat16"
"""What a quantised file is worth, at half of float32's traffic."""


class GgufCheckpoint:
    """A ``Checkpoint`` over a memory-mapped GGUF file; tensors are dequantised one at a time, to float32.

    Raises ``ModelLoadError`` and ``UnsupportedArchitectureError``.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source.name
        if source.gguf_file is None:
            raise ModelLoadError(source.name, "not a GGUF source")
        self._file = source.gguf_file
        try:
            reader: Any = gguf.GGUFReader(source.gguf_file)
            values = {key: field.contents() for key, field in reader.fields.items() if key not in _LONG_LISTS}
        except Exception as error:  # the library raises whatever a damaged file makes it stumble over
            raise ModelLoadError(source.name, f"cannot read {source.gguf_file.name}: {error}") from error
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        name = Fields(self._source, values).text("general.architecture")
        self._architecture = find_architecture(self._source, name, GGUF_ARCHITECTURES)
        # the converter has turned what is kept transposed, and has added its offset to the norms
        self._layout = replace(self._architecture.layout, transposed=False, norm_offset=0.0)
        shapes = {key: _shape(tensor) for key, tensor in tensors.items()}
        divisors = {key: self._divisors(tensors.pop(key)) for key in DIVISORS if key in tensors}
        self._config = read_gguf_config(GgufFacts(self._source, values, shapes, divisors), self._architecture)
        self._tensors = self._renamed(name, tensors)

    def config(self) -> ModelConfig:
        """The model's configuration, from the file's metadata and from which tensors it has."""
        return self._config

    def layout(self) -> Layout:
        """How the tensors are kept, as this class gives them."""
        return self._layout

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint``."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def stored_dtype(self) -> str:
        """See ``GGUF_DTYPE``."""
        return GGUF_DTYPE

    def load(self, name: str) -> torch.Tensor:
        """See ``Checkpoint``."""
        tensor = self._tensors[name]
        values = self._dequantised(name, tensor, tensor.data).reshape(_shape(tensor))
        return self._in_order(name)(torch.from_numpy(np.require(values, requirements=["C", "W"])))

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """See ``Checkpoint``."""
        tensor, shape = self._tensors[name], _shape(self._tensors[name])
        if self._is_reordered(name) or len(tensor.data) != shape[0]:
            yield self.load(name)
        else:
            for rows in row_pieces(shape):
                values = self._dequantised(name, tensor, tensor.data[rows]).reshape(-1, *shape[1:])
                yield torch.from_numpy(np.require(values, requirements=["C", "W"]))
        drop_pages(tensor.data.ctypes.data, tensor.data.nbytes)

    def files(self) -> list[Path]:
        """See ``Checkpoint``."""
        return [self._file]

    def quantised(self, name: str, dtype: torch.dtype) -> QuantisedWeight | None:
        """See ``Checkpoint``."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in FORMATS:
            return None
        weight, in_order = read_blocks(kind, tensor.data, _shape(tensor)[1], dtype), self._in_order(name)
        minima = None if weight.minima is None else in_order(weight.minima)
        drop_pages(tensor.data.ctypes.data, tensor.data.nbytes)
        return replace(weight, integers=in_order(weight.integers), scales=in_order(weight.scales), minima=minima)

    def _in_order(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives the rows of a tensor the order they have in transformers."""
        if not self._is_reordered(name):
            return lambda rows: rows
        n_heads = self._config.n_heads if name.split(".")[-2] == "q_proj" else self._config.n_kv_heads
        return lambda rows: _unpermuted(rows, n_heads)

    def _is_reordered(self, name: str) -> bool:
        return self._architecture.gguf_permuted and name.split(".")[-2] in ("q_proj", "k_proj")

    def _renamed(self, architecture: str, tensors: dict[str, Any]) -> dict[str, Any]:
        """By the names transformers has, as the converter translates them; what is left over keeps its own."""
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(kinds[architecture], self._config.n_layers)
        ours = {}
        for name in expected_shapes(self._config, self._layout):
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored in tensors:
                ours[name] = tensors.pop(stored)
        return ours | tensors

    def _divisors(self, tensor: Any) -> tuple[float, ...]:
        return tuple(self._dequantised(tensor.name, tensor, tensor.data).flatten().tolist())

    def _dequantised(self, name: str, tensor: Any, data: np.ndarray) -> np.ndarray:
        try:
            values: np.ndarray = gguf.dequantize(data, tensor.tensor_type)
        except Exception as error:  # NotImplementedError for a type it cannot dequantise, ValueError for damaged data
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ModelLoadError(self._source, f"cannot dequantise {name} of type {kind}: {error}") from error
        return values.astype(np.float32, copy=False)


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF writes the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _unpermuted(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo the converter's reordering: within a head it puts the two halves that rope pairs next to each other."""
    pairs = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
