"""A Llama-shaped decoder in the CPU kernels: one native call an iteration."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from orca_core.attention.base import AttentionBackend
from orca_core.attention.cpu import c_spec, span_table
from orca_core.batch import Batch
from orca_core.kernels import Heads, Kernels, PackedLinear
from orca_core.kernels.structs import CBatch, CHeads, CLayer, CModel, CRope, CTimes
from orca_core.kv import KVPool, KVShape
from orca_core.models.decoder import Decoder
from orca_core.models.layers import LayerWeights, Linear, Norm
from orca_core.models.rope import RotaryTable
from orca_core.quantised import free

_CPU: Final = torch.device("cpu")


def why_not_native(decoder: Decoder) -> str | None:
    """Why the kernels do not compute this decoder; ``None``: they do.

    What they compute: RMS norms before attention and MLP, rotary positions, an MLP gated by SiLU (Llama, Mistral,
    Phi-3, Qwen2, Qwen3, SmolLM3).
    """
    config, layers = decoder.config, decoder.weights.layers
    sizes = (config.hidden_size, config.n_heads * config.head_dim, config.intermediate_size)
    checks = {
        f"it is in {str(decoder.dtype).removeprefix('torch.')}, not bfloat16": decoder.dtype != torch.bfloat16,
        "its norms are not RMS norms": config.norm == "layer",
        "its norms do not lie before attention and MLP alone": any(
            layer.attention_norm is None or layer.mlp_norm is None or layer.attention_post_norm or layer.mlp_post_norm
            for layer in layers
        ),
        "its q and k are normalised over the whole width": config.qk_norm == "width",
        "its MLP is not gated by SiLU": not config.gated_mlp or config.activation != "silu",
        "its positions are learned": config.learned_positions,
        "it has odd sizes": any(size % 2 for size in sizes),
    }
    return next((why for why, stands_in_the_way in checks.items() if stands_in_the_way), None)


class NativeDecoder:
    """``AnyDecoder`` over packed weights.

    It takes over the weights of a torch decoder, which cannot compute any more afterwards: they are packed one after
    the other, and what was packed is freed, so that they are never there twice. ``why_not_native`` must be ``None``.

    A row's logits do not depend on what is computed beside it, on how its prompt was cut into pieces, or on the number
    of threads, to the last bit.

    ``times``: where the time of iterations goes is added to it; ``None``, as it is at first: nobody asks.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        self.config = decoder.config
        self.dtype: Final = decoder.dtype
        self.device: Final = _CPU
        self.kv_shape: Final[KVShape] = decoder.kv_shape
        self.n_parameters: Final = decoder.n_parameters
        self.weight_bytes: Final = decoder.weight_bytes
        self._kernels = kernels
        self._kept: list[torch.Tensor | PackedLinear] = []  # what the structures point to
        self._ropes = decoder.rope_tables
        self._model = self._take(decoder)
        self.times: CTimes | None = None
        self._pool: KVPool | None = None
        self._logits = torch.empty(0, self.config.vocab_size)

    def next_logits(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor | None:
        """See ``AnyDecoder``. ``attention`` is not asked: the kernels attend themselves."""
        if pool is not self._pool:
            self._use(pool)
        self._check(batch, pool)
        n_samples = int(batch.sample_rows.shape[0])
        if n_samples > self._logits.shape[0]:
            self._logits = torch.empty(n_samples, self.config.vocab_size)
        table = span_table(batch, pool)
        angles = [_halves(rope, batch.positions) for rope in self._ropes]
        ropes = (CRope * max(len(angles), 1))(
            *(CRope(cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1]) for cos, sin in angles)
        )
        samples = torch.tensor([i for i, span in enumerate(batch.spans) if span.samples], dtype=torch.int32)
        self._kernels.forward(self._model, CBatch(
            batch.tokens.data_ptr(), batch.slots.data_ptr(), ropes, table.c(), batch.sample_rows.data_ptr(),
            samples.data_ptr(), self._logits.data_ptr(), batch.n_tokens, n_samples, torch.get_num_threads(),
            None if self.times is None else ctypes.pointer(self.times),
        ))  # fmt: skip
        return self._capped(self._logits[:n_samples]) if n_samples else None

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _check(self, batch: Batch, pool: KVPool) -> None:
        """What the native code relies on. Raises ``ValueError``."""
        for column in (batch.tokens, batch.slots, batch.positions, batch.sample_rows):
            if column.device.type != "cpu" or column.dtype != torch.int64 or not column.is_contiguous():
                raise ValueError("the columns of a batch must be contiguous int64 on the CPU")
        _check_range(batch.tokens, self.config.vocab_size, "token")
        _check_range(batch.slots, pool.n_blocks * pool.block_size, "slot")

    def _use(self, pool: KVPool) -> None:
        if pool.shape != self.kv_shape:
            raise ValueError(f"a pool of {pool.shape} is not this model's")
        self._pool = pool
        for i in range(self.config.n_layers):
            layer = self._model.layers[i]
            layer.keys, layer.values = pool.keys[i].data_ptr(), pool.values[i].data_ptr()

    # --- taking over the weights -------------------------------------------------------------------------------------

    def _take(self, decoder: Decoder) -> CModel:
        config, weights = self.config, decoder.weights
        layers = (CLayer * config.n_layers)()
        for index, (made, layer) in enumerate(zip(layers, weights.layers, strict=True)):
            self._take_layer(made, layer)
            made.attention = c_spec(decoder.attention_specs[index])
            made.rope = -1 if (rope := decoder.rope_of[index]) is None else rope
        tied = weights.head is weights.embedding
        head = self._linear(Linear(weights.head))
        embedding = head if tied else self._linear(Linear(weights.embedding))
        heads = Heads(config.n_heads, config.n_kv_heads, config.head_dim)
        scale = 1.0 if config.embedding_scale is None else float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        return CModel(
            layers, head.c(), embedding.c(), self._float(*weights.norm.tensors()),
            CHeads(heads.n_heads, heads.n_kv_heads, heads.head_dim), config.n_layers, config.norm_eps, scale,
        )  # fmt: skip

    def _take_layer(self, made: CLayer, layer: LayerWeights) -> None:
        made.qkv, made.output = self._linear(layer.qkv).c(), self._linear(layer.output).c()
        made.gate_up, made.down = self._linear(layer.gate_up, gated=True).c(), self._linear(layer.down).c()
        made.attention_norm, made.mlp_norm = self._norm(layer.attention_norm), self._norm(layer.mlp_norm)
        if layer.qk_norm is not None:
            (weight,) = layer.qk_norm.tensors()  # one row a head, all of q's the same, and all of k's
            made.q_norm, made.k_norm = self._float(weight[0]), self._float(weight[self.config.n_heads])

    def _linear(self, linear: Linear, *, gated: bool = False) -> PackedLinear:
        packed = self._kernels.pack(linear.weight, linear.bias, gated=gated)
        self._kept.append(packed)
        free(linear.weight)
        return packed

    def _norm(self, norm: Norm | None) -> int:
        if norm is None:
            raise ValueError("a layer without a norm before it")
        return self._float(*norm.tensors())

    def _float(self, weight: torch.Tensor) -> int:
        wide = weight.to(torch.float32).contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _halves(rope: RotaryTable, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope.angles(positions)
    return cos.contiguous(), sin.contiguous()


def _check_range(column: torch.Tensor, end: int, name: str) -> None:
    low, high = torch.aminmax(column)
    if low < 0 or high >= end:
        raise ValueError(f"a {name} outside 0 to {end}")


__all__ = ["NativeDecoder", "why_not_native"]
