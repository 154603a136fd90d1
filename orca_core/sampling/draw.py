"""One draw from each row: the inverse of the cumulative distribution at a point that only (seed, position) decide.

Probabilities are whole numbers here, in units of 2^-k of the most likely token: integer sums come out the same however
a device splits them over threads, which floating-point sums do not. What is left out is less than half a unit a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from orca_core.sampling.rows import SamplingRow

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


def draw(logits: torch.Tensor, peaks: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token ids ``[n]`` for rows without a filter, from logits ``[n, vocab]`` and their maxima ``[n, 1]``, finite."""
    cumulative = _weights(_scaled(logits, peaks, rows), logits.shape[-1]).cumsum(dim=-1)
    target = _target(cumulative[:, -1:], rows)
    # the first id whose cumulative weight is above the target: never one of weight 0
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def draw_filtered(logits: torch.Tensor, peaks: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """As ``draw``, from what top_k, top_p (of what top_k left) and min_p keep.

    Each of the three keeps a beginning of the tokens in order of likelihood, equal ones in order of their ids; so the
    draw runs along that order, and only as far as the filters can reach.
    """
    vocab = logits.shape[-1]
    x = _scaled(logits, peaks, rows)
    largest_k = max((row.params.top_k for row in rows), default=0)
    n_best = min(max(largest_k, 0 if all(row.params.top_k for row in rows) else _PREFIX), vocab)
    ids, complete = _draw_from_best(x, rows, n_best)
    unfinished = [i for i, done in enumerate(complete.tolist()) if not done]
    if unfinished:
        index = torch.tensor(unfinished, device=x.device)
        ids[index] = _draw_from_best(x[index], [rows[i] for i in unfinished], vocab)[0]
    return ids


def _draw_from_best(x: torch.Tensor, rows: Sequence[SamplingRow], n_best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[n]``, and whether the ``n_best`` most likely tokens held all that the filters keep."""
    vocab = x.shape[-1]
    best = torch.topk(x, n_best, dim=-1).values if n_best < vocab else _sorted(x)
    weights = _weights(best, vocab)
    cumulative = weights.cumsum(dim=-1)
    top_k = _column([min(row.params.top_k or vocab, vocab) for row in rows], torch.int64, x)
    keep = torch.arange(n_best, device=x.device) < top_k
    if any(row.params.top_p < 1.0 for row in rows):
        total = torch.where(
            top_k < vocab,
            cumulative.gather(-1, (top_k - 1).clamp(max=n_best - 1)),
            _weights(x, vocab).sum(dim=-1, keepdim=True),
        )
        top_p = _column([row.params.top_p for row in rows], torch.float64, x)
        # a token stays while those before it have not reached top_p: the smallest set that does, never an empty one
        keep &= ((cumulative - weights).double() < top_p * total.double()) | (top_p >= 1.0)
    # p >= min_p * max p; x is 0 at the most likely token
    keep &= best.double().exp() >= _column([row.params.min_p for row in rows], torch.float64, x)
    n_keep = keep.sum(dim=-1, keepdim=True)
    rank = torch.searchsorted(cumulative, _target(cumulative.gather(-1, n_keep - 1), rows), right=True)
    value = best.gather(-1, rank)
    nth = rank - (best > value).sum(dim=-1, keepdim=True)  # among equal ones, the nth by id
    ids = ((x == value).cumsum(dim=-1) <= nth).sum(dim=-1)
    complete = (n_keep < n_best) | (top_k <= n_best)
    return ids, complete.squeeze(-1)


def _scaled(logits: torch.Tensor, peaks: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Relative to the largest, so that a small temperature cannot overflow upwards; then divided by temperature."""
    return (logits - peaks) / _column([row.params.temperature for row in rows], logits.dtype, logits)


def _sorted(x: torch.Tensor) -> torch.Tensor:
    """Each row in descending order. On a CPU numpy's sort is many times faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _weights(x: torch.Tensor, vocab: int) -> torch.Tensor:
    """``exp(x)``, x <= 0, in units so small that int64 just holds ``vocab`` times the largest."""
    unit_bits = 62 - max(vocab - 1, 1).bit_length()
    return x.exp().double().mul_(2.0**unit_bits).round_().long()


def _target(total: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """``[n, 1]`` whole numbers in [0, total), at the rows' points."""
    points = _column([uniform(row.seed, row.position) for row in rows], torch.float64, total)
    return torch.minimum((points * total.double()).long(), total - 1)


def _column(values: Sequence[float], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(-1)
