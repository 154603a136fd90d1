"""Blocks of 32 integers with a float16 scale (and minimum), as GGUF keeps them.

Their layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q8_0, block_q4_0, block_q4_1)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from orca_core.quantised import GROUP, Format, QuantisedWeight, two_in_a_byte

FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "Q8_0": Format(8, grouped=True),
        "Q4_0": Format(4, grouped=True),
        "Q4_1": Format(4, grouped=True, with_minimum=True),
    }
)
"""Types of tensors whose blocks are taken as they are."""


def read_blocks(kind: str, data: np.ndarray, n_in: int, dtype: torch.dtype) -> QuantisedWeight:
    """A matrix of type ``kind``, which is in ``FORMATS``; ``data``: uint8 ``[n_out, bytes]``."""
    form = FORMATS[kind]
    n_out, n_groups = data.shape[0], n_in // GROUP
    blocks = torch.tensor(data).view(n_out, n_groups, -1)
    scales, rest = blocks[..., :2], blocks[..., 2:]
    minima = None
    if form.with_minimum:
        minima, rest = rest[..., :2], rest[..., 2:]
    if form.bits == 8:
        integers = rest.reshape(n_out, n_in).view(torch.int8)
    else:  # byte i holds the integers i and 16 + i
        integers = two_in_a_byte(torch.cat((rest & 15, rest >> 4), -1).view(n_out, n_in))
    return QuantisedWeight(form, integers, _float16(scales), None if minima is None else _float16(minima), n_in, dtype)


def _float16(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.float16).squeeze(-1)
