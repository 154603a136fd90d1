"""What loading does only on a CPU: native kernels where they can be had, torch where not."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from orca_core.attention import AttentionBackend
from orca_core.attention.cpu import NativeAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.kernels import KernelError, Kernels, find_kernels
from orca_core.models import AnyDecoder, Decoder, OpenedModel
from orca_core.models.native import NativeDecoder, packer, why_not_native
from orca_core.models.weight_cache import WeightCache

logger = logging.getLogger(__name__)


class Compute(NamedTuple):
    """Who computes what. ``kernels``: those that draw tokens; ``None`` = torch does."""

    decoder: AnyDecoder
    attention: AttentionBackend
    kernels: Kernels | None = None


def choose_compute(given: Decoder | OpenedModel, cache: WeightCache | None = None) -> Compute:
    """The fastest that compute this model on this CPU; what stands in the way is logged.

    float32 stays in torch, whose sums the tests of exactness lean on. What torch computes is dequantised first. A
    decoder that was given may be used up: go on with the one that is returned. Of an opened model no more is loaded
    than is needed: what the kernels compute is packed tensor by tensor, or comes from ``cache``.

    Raises ``ModelLoadError``.
    """
    frame = given if isinstance(given, Decoder) else given.frame
    if frame.dtype != torch.bfloat16:
        return Compute(_for_torch(given, "they compute in bfloat16"), ReferenceAttention())
    try:
        kernels = find_kernels()
    except KernelError as error:
        logger.warning("everything runs in torch, several times slower than in the CPU kernels: %s", error)
        return Compute(_for_torch(given, str(error)), ReferenceAttention())
    attention = NativeAttention(kernels)
    why = why_not_native(frame, given.weights.layers[0] if isinstance(given, Decoder) else given.reader.layout)
    if why is not None:
        logger.info("the CPU kernels compute attention and draw tokens, torch does the rest: %s", why)
        return Compute(_for_torch(given, why), attention, kernels)
    if isinstance(given, Decoder):
        return Compute(NativeDecoder.taking(given, kernels), attention, kernels)
    packed = (cache or WeightCache(None)).packed(
        packer(frame, given.reader, kernels), kernels, given.files, f"{given.reader.bits} bits"
    )
    return Compute(NativeDecoder(frame, packed, kernels), attention, kernels)


def _for_torch(given: Decoder | OpenedModel, why: str) -> Decoder:
    """Without quantised weights, which torch would dequantise in every iteration."""
    decoder = given if isinstance(given, Decoder) else given.decoder()
    if not decoder.is_quantised:
        return decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    logger.warning("weights are quantised, but held in %s: no memory is saved without the CPU kernels: %s", dtype, why)
    return Decoder(decoder.config, decoder.weights.dequantised())
