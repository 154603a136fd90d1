"""One draw from each row: the inverse of the cumulative distribution at a point that only (seed, position) decide.

Probabilities are whole numbers here, in units of 2^-k of the most likely token: integer sums come out the same however
a device splits them over threads, which floating-point sums do not. What is left out is less than half a unit a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from orca_core.kernels import DRAW
from orca_core.sampling.rows import SamplingRow
from orca_core.staging import Column, Upload

_PREFIX: Final = 1024
"""top_p and min_p look at that many of the most likely tokens; only a flat distribution needs all of them in order."""

_MASK64: Final = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from two 64-bit integers, the same on every machine (splitmix64's finaliser, twice)."""
    return (_mix(_mix(seed & _MASK64) ^ (position & _MASK64)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw from rows without a filter, planned on the host. Columns are usable once the upload was sent.

    ``rows``: which rows of the batch; ``index``: the same on the device. ``points``: where each row's draw falls, in
    [0, 1).
    """

    rows: tuple[int, ...]
    index: Column
    temperature: Column
    points: Column

    def scaled(self, logits: torch.Tensor, peaks: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """The rows' logits ``[n, vocab]``, a copy that is overwritten, made ready for ``choose``.

        Relative to ``peaks`` ``[n, 1]``, so that a small temperature cannot overflow upwards; then divided by
        temperature. Zeros where ``sound`` ``[n, 1]`` is False.
        """
        return logits.sub_(peaks).div_(_wide(self.temperature)).masked_fill_(~sound, 0.0)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids ``[n]`` from what ``scaled`` made; and ``None``: it never has to look again."""
        cumulative = _weights(x, x.shape[-1]).cumsum(dim=-1)
        # the first id whose cumulative weight is above the target: never one of weight 0
        return torch.searchsorted(cumulative, _target(cumulative[:, -1:], self), right=True).squeeze(-1), None


@dataclass(frozen=True, slots=True)
class FilteredDraw(Draw):
    """As ``Draw``, from what top_k, top_p (of what top_k left) and min_p keep.

    Each of the three keeps a beginning of the tokens in order of likelihood, equal ones in order of their ids; so the
    draw runs along that order, and only ``n_best`` tokens far. ``any_top_p``: some row has that filter.
    """

    top_k: Column
    top_p: Column
    min_p: Column
    n_best: int
    any_top_p: bool

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids ``[n]``, and bool ``[n]``: the ``n_best`` most likely tokens held all that the filters keep."""
        vocab, n_best = x.shape[-1], self.n_best
        best = torch.topk(x, n_best, dim=-1).values if n_best < vocab else _sorted(x)
        weights = _weights(best, vocab)
        cumulative = weights.cumsum(dim=-1)
        top_k = _wide(self.top_k)
        keep = torch.arange(n_best, device=x.device) < top_k
        if self.any_top_p:
            total = torch.where(
                top_k < vocab,
                cumulative.gather(-1, (top_k - 1).clamp(max=n_best - 1)),
                _weights(x, vocab).sum(dim=-1, keepdim=True),
            )
            top_p = _wide(self.top_p)
            # a token stays while those before it have not reached top_p: the smallest set that does, never an empty one
            keep &= ((cumulative - weights).double() < top_p * total.double()) | (top_p >= 1.0)
        # p >= min_p * max p; x is 0 at the most likely token
        keep &= best.double().exp() >= _wide(self.min_p)
        n_keep = keep.sum(dim=-1, keepdim=True)
        rank = torch.searchsorted(cumulative, _target(cumulative.gather(-1, n_keep - 1), self), right=True)
        value = best.gather(-1, rank)
        nth = rank - (best > value).sum(dim=-1, keepdim=True)  # among equal ones, the nth by id
        ids = ((x == value).cumsum(dim=-1) <= nth).sum(dim=-1)
        complete = (n_keep < n_best) | (top_k <= n_best)
        return ids, complete.squeeze(-1)


def plan_draw(rows: Sequence[SamplingRow], picked: Sequence[int], upload: Upload) -> Draw:
    """A draw from the ``picked`` ones of the batch's rows, none with a filter."""
    return Draw(*_common(rows, picked, upload))


def plan_filtered_draw(
    rows: Sequence[SamplingRow], picked: Sequence[int], vocab: int, upload: Upload, *, whole: bool = False
) -> FilteredDraw:
    """A draw from the ``picked`` rows, all with a filter. ``whole``: in order of all tokens, not only the likeliest."""
    params = [rows[i].params for i in picked]
    deepest = max((p.top_k for p in params), default=0)
    n_best = min(max(deepest, 0 if all(p.top_k for p in params) else _PREFIX), vocab)
    return FilteredDraw(
        *_common(rows, picked, upload),
        upload.add([min(p.top_k or vocab, vocab) for p in params], torch.int64),
        upload.add([p.top_p for p in params], torch.float64),
        upload.add([p.min_p for p in params], torch.float64),
        vocab if whole else n_best,
        any(p.top_p < 1.0 for p in params),
    )


def native_draws(rows: Sequence[SamplingRow], vocab: int) -> np.ndarray:
    """All rows' draws as the kernels read them, ``[n]`` of ``DRAW``: zeros for greedy ones."""
    draws = np.zeros(len(rows), DRAW)
    for i, row in enumerate(rows):
        if not row.is_greedy:
            p = row.params
            draws[i] = (p.temperature, min(p.top_k, vocab), p.top_p, p.min_p, uniform(row.seed, row.position))
    return draws


def _common(
    rows: Sequence[SamplingRow], picked: Sequence[int], upload: Upload
) -> tuple[tuple[int, ...], Column, Column, Column]:
    return (
        tuple(picked),
        upload.add(picked, torch.int64),
        upload.add([rows[i].params.temperature for i in picked], torch.float32),
        upload.add([uniform(rows[i].seed, rows[i].position) for i in picked], torch.float64),
    )


def _sorted(x: torch.Tensor) -> torch.Tensor:
    """Each row in descending order. On a CPU numpy's sort is many times faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _weights(x: torch.Tensor, vocab: int) -> torch.Tensor:
    """``exp(x)``, x <= 0, in units so small that int64 just holds ``vocab`` times the largest."""
    unit_bits = 62 - max(vocab - 1, 1).bit_length()
    return x.exp().double().mul_(2.0**unit_bits).round_().long()


def _target(total: torch.Tensor, plan: Draw) -> torch.Tensor:
    """``[n, 1]`` whole numbers in [0, total), at the rows' points."""
    return torch.minimum((_wide(plan.points) * total.double()).long(), total - 1)


def _wide(column: Column) -> torch.Tensor:
    return column.tensor.unsqueeze(-1)
