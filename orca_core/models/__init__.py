"""Decoders: configuration, weights and the forward pass."""

from __future__ import annotations

from orca_core.models.config import LayerConfig, ModelConfig, RopeConfig
from orca_core.models.decoder import Decoder
from orca_core.models.loading import OpenedModel, load_model, open_model, read_shape
from orca_core.models.protocol import AnyDecoder

__all__ = [
    "AnyDecoder", "Decoder", "LayerConfig", "ModelConfig", "OpenedModel", "RopeConfig", "load_model", "open_model",
    "read_shape",
]  # fmt: skip
