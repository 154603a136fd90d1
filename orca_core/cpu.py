"""What loading does only on a CPU: native kernels where they can be had, torch where not."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from orca_core.attention import AttentionBackend
from orca_core.attention.cpu import NativeAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.kernels import KernelError, Kernels, find_kernels
from orca_core.models import AnyDecoder, Decoder
from orca_core.models.native import NativeDecoder, why_not_native

logger = logging.getLogger(__name__)


class Compute(NamedTuple):
    """Who computes what. ``kernels``: those that draw tokens; ``None`` = torch does."""

    decoder: AnyDecoder
    attention: AttentionBackend
    kernels: Kernels | None = None


def choose_compute(decoder: Decoder) -> Compute:
    """The fastest that compute this model on this CPU; what stands in the way is logged.

    float32 stays in torch, whose sums the tests of exactness lean on. What torch computes is dequantised first. The
    decoder that was given may be used up: go on with the one that is returned.
    """
    if decoder.dtype != torch.bfloat16:
        return Compute(_for_torch(decoder, "they compute in bfloat16"), ReferenceAttention())
    try:
        kernels = find_kernels()
    except KernelError as error:
        logger.warning("everything runs in torch, several times slower than in the CPU kernels: %s", error)
        return Compute(_for_torch(decoder, str(error)), ReferenceAttention())
    attention = NativeAttention(kernels)
    why = why_not_native(decoder)
    if why is not None:
        logger.info("the CPU kernels compute attention and draw tokens, torch does the rest: %s", why)
        return Compute(_for_torch(decoder, why), attention, kernels)
    return Compute(NativeDecoder(decoder, kernels), attention, kernels)


def _for_torch(decoder: Decoder, why: str) -> Decoder:
    """Without quantised weights, which torch would dequantise in every iteration."""
    if not decoder.is_quantised:
        return decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    logger.warning("weights are quantised, but held in %s: no memory is saved without the CPU kernels: %s", dtype, why)
    return Decoder(decoder.config, decoder.weights.dequantised())
