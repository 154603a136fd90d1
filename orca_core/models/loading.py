"""The one door from a model's files to a decoder on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from orca_core.config import Quantization
from orca_core.errors import ConfigError
from orca_core.kv import KVShape
from orca_core.models.checkpoint import Checkpoint
from orca_core.models.config import ModelConfig
from orca_core.models.decoder import Decoder, DecoderFrame
from orca_core.models.fields import Fields
from orca_core.models.gguf_file import GGUF_DTYPE, GgufCheckpoint
from orca_core.models.gguf_header import read_gguf_header
from orca_core.models.hf_config import read_hf_config
from orca_core.models.layout import Layout
from orca_core.models.registry import GGUF_ARCHITECTURES, find_architecture
from orca_core.models.safetensors_files import SafetensorsCheckpoint
from orca_core.models.weights import WeightReader, load_weights
from orca_core.source import ModelSource

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_BITS: Final[Mapping[str, int]] = MappingProxyType({"int8": 8, "int4": 4})


def load_model(
    source: ModelSource, *, dtype: str, device: torch.device, max_model_len: int | None = None,
    quantization: Quantization = "none",
) -> Decoder:  # fmt: skip
    """Read configuration and weights and put them on ``device``.

    ``max_model_len``: the longest request that will be served, in tokens; ``None`` = whatever the model can. The
    decoder's ``config.max_position_embeddings`` is never more: a rope of two sets (longrope) chooses by it.

    ``dtype``: a torch name, or ``auto``: the checkpoint's own, bfloat16 for a GGUF file; on a CPU float32 instead of
    float16, and instead of bfloat16 where the CPU has no instructions for it.

    ``quantization``: of the projections, the head and the embedding; ``auto`` is then bfloat16 where the CPU has it.

    Raises ``ModelLoadError``, ``UnsupportedArchitectureError``, and ``ConfigError`` for an unknown dtype.
    """
    return open_model(
        source, dtype=dtype, device=device, max_model_len=max_model_len, quantization=quantization
    ).decoder()


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights can be read. ``files``: all that what it computes comes from."""

    frame: DecoderFrame
    reader: WeightReader
    files: tuple[Path, ...]

    def decoder(self) -> Decoder:
        """With all weights loaded. Raises ``ModelLoadError``."""
        return Decoder(self.frame.config, load_weights(self.reader))


def open_model(
    source: ModelSource, *, dtype: str, device: torch.device, max_model_len: int | None = None,
    quantization: Quantization = "none",
) -> OpenedModel:  # fmt: skip
    """Read the configuration, and see that the weights are those it promises. As ``load_model`` otherwise."""
    config, layout, checkpoint = _open(source)
    stored = "bfloat16" if quantization != "none" else config.dtype or checkpoint.stored_dtype()
    chosen = _choose_dtype(dtype, stored, device)
    bits = None if quantization == "none" else _BITS[quantization]
    reader = WeightReader(source.name, config, layout, checkpoint, chosen, device, bits)
    limit = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    frame = DecoderFrame(replace(config, max_position_embeddings=limit), chosen, device)
    config_file = source.folder / "config.json"
    files = [*checkpoint.files(), *([config_file] if source.kind == "safetensors" else [])]
    return OpenedModel(frame, reader, tuple(files))


def read_shape(source: ModelSource, *, dtype: str, device: torch.device) -> tuple[int, KVShape]:
    """The model's own limit in tokens, and what a slot holds in the decoder ``load_model`` would make.

    From headers alone, in milliseconds; so not everything is refused that ``load_model`` refuses. Raises as it does.
    """
    if source.gguf_file is not None:
        return _gguf_shape(source.name, source.gguf_file, dtype, device)
    config, _, checkpoint = _open(source)
    chosen = _choose_dtype(dtype, config.dtype or checkpoint.stored_dtype(), device)
    return config.max_position_embeddings, KVShape(config.n_layers, config.n_kv_heads, config.head_dim, chosen)


def _gguf_shape(name: str, file: Path, dtype: str, device: torch.device) -> tuple[int, KVShape]:
    values = read_gguf_header(name, file)
    architecture = find_architecture(name, Fields(name, values).text("general.architecture"), GGUF_ARCHITECTURES)
    fields = Fields(name, values, f"{architecture.gguf_name}.")
    n_heads = fields.integer("attention.head_count")
    shape = KVShape(
        fields.layer_count("block_count"),
        fields.integer("attention.head_count_kv", default=n_heads),
        fields.integer("attention.key_length", default=fields.integer("embedding_length") // max(n_heads, 1)),
        _choose_dtype(dtype, GGUF_DTYPE, device),
    )
    return fields.integer("context_length"), shape


def _open(source: ModelSource) -> tuple[ModelConfig, Layout, Checkpoint]:
    if source.kind == "gguf":
        file = GgufCheckpoint(source)
        return file.config(), file.layout(), file
    config, architecture = read_hf_config(source)
    checkpoint, layout = SafetensorsCheckpoint(source), architecture.layout
    if f"{layout.embedding}.weight" in checkpoint.shapes():
        # saved from the model without its head, which is the embedding again (openai-community/gpt2)
        layout = replace(layout, prefix="")
    return config, layout, checkpoint


def _choose_dtype(dtype: str, stored: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return _auto_dtype(stored, device)
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _auto_dtype(name: str, device: torch.device) -> torch.dtype:
    dtype = DTYPES[name]
    if device.type == "cpu" and (dtype is torch.float16 or (dtype is torch.bfloat16 and not cpu_has_bfloat16())):
        return torch.float32
    return dtype


def cpu_has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; without such instructions torch emulates them, slower than float32."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        # private to torch, so a later release may have dropped it: then float32, which is always right
        supported = getattr(torch.cpu, name, None)
        if supported is not None and supported():
            return True
    return False
