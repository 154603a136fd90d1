"""Penalties, bias and ban: what is done to the logits of a row before anything is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from orca_core.sampling.rows import SamplingRow

_MINUS_INF = float("-inf")


def apply_changes(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits ``[n, vocab]`` after the rows' changes; ``logits`` itself, never modified, where no row asks for any."""
    if not any(row.changes_logits for row in rows):
        return logits
    changed = logits.clone()
    for x, row in zip(changed, rows, strict=True):
        if row.changes_logits:
            _change_row(x, row)
    return changed


def _change_row(x: torch.Tensor, row: SamplingRow) -> None:
    """Change one row ``[vocab]`` in place, touching only the ids that occur.

    Repetition penalty as in CTRL (arXiv 1909.05858) and transformers, over prompt and output; presence and frequency
    as in OpenAI's API reference, over the output.
    """
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = _tensor({*row.prompt_ids, *row.output_ids}, torch.int64, x)
        values = x[seen]
        limits = torch.finfo(x.dtype)
        # a penalty that rounds to 0 would make NaN of a token the model rules out: -inf * 0
        penalty = max(p.repetition_penalty, limits.tiny)
        values = torch.where(values > 0, values / penalty, values * penalty)
        # nor may one near 0 turn a likely token into an infinite one
        x[seen] = values.clamp(max=limits.max)
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        counts = Counter(row.output_ids)
        times = _tensor(counts.values(), x.dtype, x)
        x[_tensor(counts, torch.int64, x)] -= p.frequency_penalty * times + p.presence_penalty
    if p.logit_bias:
        x[_tensor(p.logit_bias, torch.int64, x)] += _tensor(p.logit_bias.values(), x.dtype, x)
    if row.bans:
        x[_tensor(row.banned_until_min, torch.int64, x)] = _MINUS_INF


def _tensor(values: Iterable[float], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=like.device)
