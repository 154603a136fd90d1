"""Penalties, bias and ban: what is done to the logits of a row before anything is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from orca_core.sampling.rows import SamplingRow
from orca_core.staging import Column, Upload

_LIMITS = torch.finfo(torch.float32)


@dataclass(slots=True)
class _Entries:
    """Places in the flattened logits, and a number for each. On the host until ``add_to``, then on the device."""

    vocab: int
    places: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)
    place: Column | None = None
    number: Column | None = None

    def take(self, row: int, ids: Collection[int], numbers: np.ndarray | float) -> None:
        """Ids of one row, each once. One the model has no logit for is left out: its place is another row's."""
        found = np.fromiter(ids, np.int64, len(ids))
        values = np.broadcast_to(np.asarray(numbers, np.float32), found.shape)
        known = found < self.vocab
        self.places.append(found[known] + row * self.vocab)
        self.numbers.append(values[known])

    def add_to(self, upload: Upload) -> None:
        if self.places:
            self.place = upload.add(np.concatenate(self.places), torch.int64)
            self.number = upload.add(np.concatenate(self.numbers), torch.float32)


class Changes:
    """What the rows ask for, ready to be applied once ``upload`` was sent.

    Repetition penalty as in CTRL (arXiv 1909.05858) and transformers, over prompt and output; presence and frequency
    as in OpenAI's API reference, over the output. Only the ids that occur are touched.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, upload: Upload) -> None:
        self._penalised, self._counted, self._biased, self._banned = (_Entries(vocab) for _ in range(4))
        for i, row in enumerate(rows):
            if row.changes_logits:
                self._take(i, row)
        for entries in (self._penalised, self._counted, self._biased, self._banned):
            entries.add_to(upload)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Changed float32 logits ``[n, vocab]``; ``logits`` itself, never modified, where no row asks for any."""
        steps = ((self._penalised, _penalise), (self._counted, torch.sub), (self._biased, torch.add))
        changed: torch.Tensor | None = None
        for entries, step in (*steps, (self._banned, torch.add)):
            if entries.place is not None and entries.number is not None:
                changed = logits.clone() if changed is None else changed
                flat, place = changed.view(-1), entries.place.tensor
                flat.index_copy_(0, place, step(flat.index_select(0, place), entries.number.tensor))
        return logits if changed is None else changed

    def _take(self, i: int, row: SamplingRow) -> None:
        p = row.params
        if p.repetition_penalty != 1.0:
            # a penalty that rounds to 0 would make NaN of a token the model rules out: -inf * 0
            self._penalised.take(i, {*row.prompt_ids, *row.output_ids}, max(p.repetition_penalty, _LIMITS.tiny))
        if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
            counts = Counter(row.output_ids)
            times = _floats(counts.values(), len(counts))
            amounts = np.float32(p.frequency_penalty) * times + np.float32(p.presence_penalty)
            self._counted.take(i, counts, amounts)
        if p.logit_bias:
            self._biased.take(i, p.logit_bias, _floats(p.logit_bias.values(), len(p.logit_bias)))
        if row.bans:
            self._banned.take(i, row.banned_until_min, -np.inf)


def _penalise(values: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    # a penalty near 0 must not turn a likely token into an infinite one
    return torch.where(values > 0, values / penalties, values * penalties).clamp(max=_LIMITS.max)


def _floats(values: Iterable[float], n: int) -> np.ndarray:
    return np.fromiter(values, np.float32, n)
