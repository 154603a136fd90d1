"""What loading needs of a file format: names, shapes, and one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from orca_core.quantised import QuantisedWeight


class Checkpoint(Protocol):
    """The tensors of one checkpoint under the names transformers gives them, whatever the file calls them."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, from the headers alone. A name without a translation stays as the file has it."""
        ...

    def stored_dtype(self) -> str:
        """The dtype that ``auto`` means for these weights, as a torch name."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in a floating dtype."""
        ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The same, some rows at a time, one piece behind the other; a piece is gone once the next is asked for."""
        ...

    def files(self) -> list[Path]:
        """All that the tensors come from."""
        ...

    def quantised(self, name: str, dtype: torch.dtype) -> QuantisedWeight | None:
        """One matrix as it is stored, counted as ``dtype``; ``None`` where it is not kept in integers that we know."""
        ...
