"""A decoder's weights in the layout of the CPU kernels, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from orca_core.kernels import Kernels, PackedLinear
from orca_core.models.decoder import Decoder
from orca_core.models.layers import LayerWeights, Linear, Norm
from orca_core.models.pages import trim_heap
from orca_core.quantised import Weight, free

_TRIM_BYTES: Final = 64 << 20
"""Of weights that were freed, before what is left of them between others is given back, which costs time."""

Part = PackedLinear | torch.Tensor
"""A projection, or a norm's weight in float32."""


class WeightSource(Protocol):
    """Where weights come from, a few at a time. What it gives is used up: it is freed once it is packed."""

    @property
    def n_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        ...

    def embedding(self) -> Weight:
        """``[vocab, hidden]``."""
        ...

    def head(self) -> Weight:
        """The same, where the two are not tied."""
        ...

    def norm(self) -> Norm:
        """The last one."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """One layer."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A ``WeightSource`` that is a torch decoder, which cannot compute any more afterwards."""

    decoder: Decoder

    @property
    def n_parameters(self) -> int:
        """See ``WeightSource``."""
        return self.decoder.n_parameters

    def embedding(self) -> Weight:
        """See ``WeightSource``."""
        return self.decoder.weights.embedding

    def head(self) -> Weight:
        """See ``WeightSource``."""
        return self.decoder.weights.head

    def norm(self) -> Norm:
        """See ``WeightSource``."""
        return self.decoder.weights.norm

    def layer(self, index: int) -> LayerWeights:
        """See ``WeightSource``."""
        return self.decoder.weights.layers[index]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """``parts``: ``embedding``, ``head`` (where it is not the embedding), ``norm``, and for each layer ``0.qkv`` and so
    on, named as in ``LayerWeights``, with ``q_norm`` and ``k_norm`` of one head. ``weight_bytes``: see ``AnyDecoder``.
    """

    parts: Mapping[str, Part]
    n_parameters: int
    weight_bytes: int


class Packer:
    """Packs what a source gives, and frees it: no two of its weights are there twice at a time.

    ``weight_bytes`` is what it came to, once all parts were taken.
    """

    def __init__(self, source: WeightSource, n_layers: int, n_heads: int, tied: bool, kernels: Kernels) -> None:
        self.weight_bytes = 0
        self.source = source
        self._n_layers = n_layers
        self._n_heads = n_heads
        self._tied = tied
        self._kernels = kernels

    def parts(self) -> Iterator[tuple[str, Part]]:
        """All, the largest first. Raises ``ModelLoadError`` and ``MemoryError``."""
        self.weight_bytes = 0
        yield "embedding", self._linear(Linear(self.source.embedding()))
        if not self._tied:
            self.weight_bytes = 0  # of an embedding that is not the head, an iteration reads some rows only
            yield "head", self._linear(Linear(self.source.head()))
        yield "norm", self._norm(self.source.norm())
        trimmed_at = 0
        for index in range(self._n_layers):
            if self.weight_bytes > trimmed_at + _TRIM_BYTES:
                trim_heap()  # without it a model in int8 took up to a third more than its weights
                trimmed_at = self.weight_bytes
            for name, part in self._layer(self.source.layer(index)):
                yield f"{index}.{name}", part
        trim_heap()

    def all(self) -> PackedWeights:
        """All of them, in memory of their own."""
        parts = dict(self.parts())
        return PackedWeights(parts, self.source.n_parameters, self.weight_bytes)

    def _layer(self, layer: LayerWeights) -> Iterator[tuple[str, Part]]:
        yield "qkv", self._linear(layer.qkv)
        yield "output", self._linear(layer.output)
        yield "gate_up", self._linear(layer.gate_up, gated=True)
        yield "down", self._linear(layer.down)
        yield "attention_norm", self._norm(layer.attention_norm)
        yield "mlp_norm", self._norm(layer.mlp_norm)
        if layer.qk_norm is not None:
            (weight,) = layer.qk_norm.tensors()  # one row a head, all of q's the same, and all of k's
            yield "q_norm", _float(weight[0])
            yield "k_norm", _float(weight[self._n_heads])

    def _linear(self, linear: Linear, *, gated: bool = False) -> PackedLinear:
        self.weight_bytes += sum(tensor.nbytes for tensor in linear.tensors())
        packed = self._kernels.pack(linear.weight, linear.bias, gated=gated)
        free(linear.weight)
        return packed

    def _norm(self, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            raise ValueError("a layer without a norm before it")
        (weight,) = norm.tensors()
        self.weight_bytes += weight.nbytes
        return _float(weight)


def _float(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float32, copy=True).contiguous()
