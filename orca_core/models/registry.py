"""The architectures there is a decoder for, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orca_core.errors import UnsupportedArchitectureError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a checkpoint's architecture implies beyond its configuration.

    ``name``: as in ``architectures`` of a config.json. ``gguf_name``: ``general.architecture`` of a GGUF file.
    ``qk_norm``: RMS norm over each head of q and k. ``default_head_dim``: where the configuration has none; ``None`` =
    hidden_size / heads. ``gguf_permuted``: llama.cpp's converter reorders the rows of q and k for its own rope.
    """

    name: str
    gguf_name: str
    qk_norm: bool
    default_head_dim: int | None
    gguf_permuted: bool


_ALL: Final = (
    Architecture("LlamaForCausalLM", "llama", qk_norm=False, default_head_dim=None, gguf_permuted=True),
    Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, default_head_dim=128, gguf_permuted=False),
)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {architecture.name: architecture for architecture in _ALL}
GGUF_ARCHITECTURES: Final[Mapping[str, Architecture]] = {architecture.gguf_name: architecture for architecture in _ALL}


def find_architecture(source: str, name: str, known: Mapping[str, Architecture] = ARCHITECTURES) -> Architecture:
    """The architecture of that name. Raises ``UnsupportedArchitectureError``; ``source`` is for its message."""
    if name not in known:
        raise UnsupportedArchitectureError(source, name, tuple(known))
    return known[name]
