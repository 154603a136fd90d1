"""A Llama-shaped decoder in the CPU kernels: one native call an iteration."""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import torch

from orca_core.attention.base import AttentionBackend
from orca_core.attention.cpu import c_spec, fill_table
from orca_core.batch import Batch
from orca_core.kernels import Kernels, PackedLinear, SpanTable
from orca_core.kernels.structs import CBatch, CHeads, CLayer, CLinear, CModel, CRope, CTimes
from orca_core.kv import KVPool, KVShape
from orca_core.models.angles import PickedAngles
from orca_core.models.decoder import Decoder, DecoderFrame
from orca_core.models.packed import LoadedWeights, PackedWeights, Packer, WeightSource

_CPU: Final = torch.device("cpu")


class LayerPlaces(Protocol):
    """Where a layer has norms: ``None`` = nowhere. Of ``LayerWeights`` and of ``Layout`` alike."""

    @property
    def attention_norm(self) -> object | None: ...
    @property
    def attention_post_norm(self) -> object | None: ...
    @property
    def mlp_norm(self) -> object | None: ...
    @property
    def mlp_post_norm(self) -> object | None: ...


def packer(frame: DecoderFrame, source: WeightSource, kernels: Kernels) -> Packer:
    """What packs the weights of a decoder, as ``NativeDecoder`` takes them."""
    return Packer(source, frame.config.n_layers, frame.config.n_heads, frame.config.tied_head, kernels)


def why_not_native(frame: DecoderFrame, layer: LayerPlaces) -> str | None:
    """Why the kernels do not compute this decoder; ``None``: they do. ``layer``: any of its layers, or the layout.

    What they compute: RMS norms before attention and MLP, rotary positions, an MLP gated by SiLU (Llama, Mistral,
    Phi-3, Qwen2, Qwen3, SmolLM3).
    """
    config = frame.config
    sizes = (config.hidden_size, config.n_heads * config.head_dim, config.intermediate_size)
    before, behind = (layer.attention_norm, layer.mlp_norm), (layer.attention_post_norm, layer.mlp_post_norm)
    checks = {
        f"it is in {str(frame.dtype).removeprefix('torch.')}, not bfloat16": frame.dtype != torch.bfloat16,
        "its norms are not RMS norms": config.norm == "layer",
        "its norms do not lie before attention and MLP alone": None in before or behind != (None, None),
        "its q and k are normalised over the whole width": config.qk_norm == "width",
        "its MLP is not gated by SiLU": not config.gated_mlp or config.activation != "silu",
        "its positions are learned": config.learned_positions,
        "it has odd sizes": any(size % 2 for size in sizes),
    }
    return next((why for why, stands_in_the_way in checks.items() if stands_in_the_way), None)


class NativeDecoder:
    """``AnyDecoder`` over packed weights; ``why_not_native`` must be ``None``.

    A row's logits do not depend on what is computed beside it, on how its prompt was cut into pieces, or on the number
    of threads, to the last bit.

    ``times``: where the time of iterations goes is added to it; ``None``, as it is at first: nobody asks.
    """

    def __init__(self, frame: DecoderFrame, packed: PackedWeights, kernels: Kernels) -> None:
        self.config = frame.config
        self.dtype: Final = frame.dtype
        self.device: Final = _CPU
        self.kv_shape: Final[KVShape] = frame.kv_shape
        self.n_parameters: Final = packed.n_parameters
        self.weight_bytes: Final = packed.weight_bytes
        self._kernels = kernels
        self._packed = packed  # what the structures point to
        self._model = self._structures(frame)
        self.times: CTimes | None = None
        self._pool: KVPool | None = None
        # what an iteration needs beside the model, in the same memory each time
        self._table = SpanTable(1)
        self._columns: _Columns | None = None
        self._angles = [PickedAngles(rope) for rope in frame.rope_tables]
        self._ropes = (CRope * max(len(self._angles), 1))()
        self._all_spans = np.arange(64, dtype=np.int32)
        self._all_logits = self._logits = torch.empty(0, self.config.vocab_size)

    @staticmethod
    def taking(decoder: Decoder, kernels: Kernels) -> NativeDecoder:
        """Over the weights of a torch decoder, which cannot compute any more afterwards: they are packed and freed."""
        return NativeDecoder(decoder, packer(decoder, LoadedWeights(decoder), kernels).all(), kernels)

    def next_logits(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor | None:
        """See ``AnyDecoder``. ``attention`` is not asked: the kernels attend themselves."""
        if pool is not self._pool:
            self._use(pool)
        columns = self._checked(batch, pool)
        fill_table(self._table, batch, pool.n_blocks)
        for index, angles in enumerate(self._angles):
            self._ropes[index] = angles.pick(columns.positions, self._table.longest)
        n_samples = batch.sample_rows.shape[0]
        logits, samples = self._logits_of(n_samples), self._sampling_spans(batch, n_samples)
        self._kernels.forward(self._model, CBatch(
            columns.tokens, columns.slots, self._ropes, self._table.c(), columns.sample_rows, samples.ctypes.data,
            logits.data_ptr(), batch.n_tokens, n_samples, torch.get_num_threads(),
            None if self.times is None else ctypes.pointer(self.times),
        ))  # fmt: skip
        return self._capped(logits) if n_samples else None

    def _logits_of(self, n_samples: int) -> torch.Tensor:
        """Room for so many rows, the same each time."""
        if n_samples > self._all_logits.shape[0]:
            self._all_logits = torch.empty(n_samples, self.config.vocab_size)
        if n_samples != self._logits.shape[0]:
            self._logits = self._all_logits[:n_samples]
        return self._logits

    def _sampling_spans(self, batch: Batch, n_samples: int) -> np.ndarray:
        """int32, which spans sample, at least ``n_samples``. Raises ``ValueError`` where they are not so many."""
        n_spans = len(batch.spans)
        if n_samples == n_spans:
            if n_spans > len(self._all_spans):
                self._all_spans = np.arange(2 * n_spans, dtype=np.int32)
            return self._all_spans
        samples = np.flatnonzero([span.samples for span in batch.spans]).astype(np.int32)
        if len(samples) != n_samples:
            raise ValueError(f"{len(samples)} spans sample, but {n_samples} rows do")
        return samples

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _checked(self, batch: Batch, pool: KVPool) -> _Columns:
        """The columns, after a look at what the native code relies on. Raises ``ValueError``."""
        columns = self._columns
        if columns is None or not columns.are_of(batch):  # in steady state they are the same ones each time
            columns = self._columns = _Columns.of(batch)
        _check_range(columns.token_bits, self.config.vocab_size, "token")
        _check_range(columns.slot_bits, pool.n_blocks * pool.block_size, "slot")
        return columns

    def _use(self, pool: KVPool) -> None:
        if pool.shape != self.kv_shape:
            raise ValueError(f"a pool of {pool.shape} is not this model's")
        self._pool, self._table = pool, SpanTable(pool.block_size)
        for i in range(self.config.n_layers):
            layer = self._model.layers[i]
            layer.keys, layer.values = pool.keys[i].data_ptr(), pool.values[i].data_ptr()

    # --- what the kernels read ---------------------------------------------------------------------------------------

    def _structures(self, frame: DecoderFrame) -> CModel:
        config = self.config
        layers = (CLayer * config.n_layers)()
        for index, made in enumerate(layers):
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(made, name, self._linear(f"{index}.{name}"))
            for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
                setattr(made, name, self._floats(f"{index}.{name}"))
            made.attention = c_spec(frame.attention_specs[index])
            made.rope = -1 if (rope := frame.rope_of[index]) is None else rope
        embedding = self._linear("embedding")
        head = embedding if config.tied_head else self._linear("head")
        return CModel(
            layers, head, embedding, self._floats("norm"),
            CHeads(config.n_heads, config.n_kv_heads, config.head_dim), config.n_layers, config.norm_eps,
            frame.embedding_scale or 1.0,
        )  # fmt: skip

    def _linear(self, name: str) -> CLinear:
        part = self._packed.parts[name]
        if not isinstance(part, PackedLinear):
            raise TypeError(f"{name} is no projection")
        return part.c()

    def _floats(self, name: str) -> int | None:
        part = self._packed.parts.get(name)
        return part.data_ptr() if isinstance(part, torch.Tensor) else None


class _Columns(NamedTuple):
    """A batch's columns as they are asked for: addresses, and arrays. ``bits``: numbers without a sign, so that what is
    negative is far too large.
    """

    tensors: tuple[torch.Tensor, ...]
    tokens: int
    slots: int
    sample_rows: int
    token_bits: np.ndarray
    slot_bits: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Raises ``ValueError``."""
        tensors = (batch.tokens, batch.slots, batch.positions, batch.sample_rows)
        for column in tensors:
            if column.device.type != "cpu" or column.dtype != torch.int64 or not column.is_contiguous():
                raise ValueError("the columns of a batch must be contiguous int64 on the CPU")
        tokens, slots, positions = (column.numpy() for column in tensors[:3])
        addresses = (batch.tokens.data_ptr(), batch.slots.data_ptr(), batch.sample_rows.data_ptr())
        return cls(tensors, *addresses, tokens.view(np.uint64), slots.view(np.uint64), positions)

    def are_of(self, batch: Batch) -> bool:
        """Whether a batch has these very tensors, whatever they hold now."""
        tokens, slots, positions, rows = self.tensors
        return (
            batch.tokens is tokens
            and batch.slots is slots
            and batch.positions is positions
            and batch.sample_rows is rows
        )


def _check_range(bits: np.ndarray, end: int, name: str) -> None:
    if np.maximum.reduce(bits, initial=0) >= end:
        raise ValueError(f"a {name} outside 0 to {end}")


__all__ = ["NativeDecoder", "packer", "why_not_native"]
