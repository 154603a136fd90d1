"""Weights as small integers: what they stand for, and how they are made from floating-point ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional as F

GROUP: Final = 32
"""Inputs that share a scale, where an output has more than one; a block of GGUF's Q8_0, Q4_0 and Q4_1."""
_CHUNK: Final = 1 << 22
"""Elements that are widened to float32 at a time."""


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are kept. ``bits``: 8 or 4; ``grouped``: a scale for each ``GROUP`` inputs of an output, float16,
    else one for each output, float32. ``with_minimum``: a minimum beside each scale.
    """

    bits: int
    grouped: bool
    with_minimum: bool = False


INT8: Final = Format(8, grouped=False)
INT4: Final = Format(4, grouped=True)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A matrix ``[n_out, n_in]`` of integers that stand for integer * scale (+ minimum).

    ``integers``: int8 ``[n_out, n_in]``; or uint8 ``[n_out, (n_in + 1) // 2]``, two of 4 bits in a byte, the earlier
    one in its lower half, 0 to 15, from which 8 is taken where there is no minimum. ``scales``, ``minima``:
    ``[n_out, 1]`` or ``[n_out, groups]``. ``dtype``: what the matrix counts as, and is in once it is dequantised.
    """

    format: Format
    integers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    n_in: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.scales.shape[0], self.n_in

    @property
    def device(self) -> torch.device:
        """Where the integers are."""
        return self.integers.device

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and minima."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def numel(self) -> int:
        """Numbers it stands for."""
        return self.shape[0] * self.shape[1]

    def dequantised(self) -> torch.Tensor:
        """``[n_out, n_in]`` in ``dtype``."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in _chunks(*self.shape):
            made[rows] = self._wide(rows).to(self.dtype)
        return made

    def free(self) -> None:
        """Give the memory back; the weight cannot be used afterwards."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def _tensors(self) -> list[torch.Tensor]:
        return [self.integers, self.scales] + ([] if self.minima is None else [self.minima])

    def _wide(self, rows: slice) -> torch.Tensor:
        """Some rows as float32."""
        integers = self.integers[rows]
        if self.format.bits == 4:
            integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1)[:, : self.n_in]
        wide = integers.to(torch.float32)
        if self.format.bits == 4 and not self.format.with_minimum:
            wide -= 8
        wide *= self._spread(self.scales[rows])
        return wide if self.minima is None else wide + self._spread(self.minima[rows])

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.to(torch.float32)
        return wide.repeat_interleave(GROUP, 1)[:, : self.n_in] if self.format.grouped else wide


Weight = torch.Tensor | QuantisedWeight
"""A matrix ``[n_out, n_in]``, in whichever form."""


def plain(weight: Weight) -> torch.Tensor:
    """The matrix itself, dequantised if need be: right, but slow."""
    return weight.dequantised() if isinstance(weight, QuantisedWeight) else weight


def free(weight: Weight) -> None:
    """Give the memory back, whoever else still holds the weight."""
    if isinstance(weight, QuantisedWeight):
        weight.free()
    else:
        weight.untyped_storage().resize_(0)


def quantise(values: torch.Tensor, bits: int, dtype: torch.dtype) -> QuantisedWeight:
    """Round a matrix ``[n_out, n_in]`` to 8 bits with one scale an output, or to 4 bits with one for each group.

    ``dtype``: what it will count as. What is not finite makes its whole row, or group, not a number.
    """
    round_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _to_int8 if bits == 8 else _to_int4
    parts = [round_rows(values[rows].to(torch.float32)) for rows in _chunks(*values.shape)]
    integers, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return QuantisedWeight(INT8 if bits == 8 else INT4, integers, scales, None, values.shape[1], dtype)


def stack(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Matrices of one format and width, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantisedWeight(
        first.format, torch.cat([part.integers for part in parts]), torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None, first.n_in, first.dtype,
    )  # fmt: skip


def two_in_a_byte(integers: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n_out, n_in]`` of 0 to 15 as ``[n_out, (n_in + 1) // 2]``."""
    padded = F.pad(integers, (0, integers.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def _to_int8(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = wide.abs().amax(1, keepdim=True) / 127
    return _rounded(wide, scales).clamp_(-127, 127).to(torch.int8), scales


def _to_int4(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number farthest from zero becomes -8, so that all sixteen integers are used (as in GGUF's Q4_0)."""
    n_in = wide.shape[1]
    groups = F.pad(wide, (0, -n_in % GROUP)).view(wide.shape[0], -1, GROUP)
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (farthest / -8).to(torch.float16)  # rounded first: the integers then fit what it will be
    integers = _rounded(groups, scales.to(torch.float32)).clamp_(-8, 7).add_(8).to(torch.uint8)
    return two_in_a_byte(integers.flatten(1)[:, :n_in]), scales.squeeze(2)


def _rounded(wide: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (wide / torch.where(scales == 0, 1, scales)).round_().nan_to_num_(0.0)


def _chunks(n_rows: int, n_columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, n_columns))
    return (slice(begin, begin + step) for begin in range(0, n_rows, step))
