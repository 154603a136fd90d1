"""Log-probabilities for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from orca_core.sampling.rows import RawLogprobs, SamplingRow
from orca_core.staging import Column, Upload

_MAGNITUDE: Final = 0x7FFFFFFF
_ID_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class LogprobsPlan:
    """Which rows ask (``rows``; ``index``: the same on the device), and for how many of the most likely tokens."""

    rows: tuple[int, ...]
    index: Column
    n_top: int

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 log-softmax of the raw logits of those rows, ``[m, vocab]``."""
        return torch.log_softmax(logits.index_select(0, self.index.tensor), dim=-1)

    def best(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and values ``[m, n_top]``, the best first and of equals the lowest id.

        The smallest of the whole numbers (-value, id): as values are at most 0, the bits of their magnitude are in
        order.
        """
        if not self.n_top:
            empty = values.new_empty(values.shape[0], 0)
            return empty, empty
        keys = ((values.view(torch.int32) & _MAGNITUDE).long() << _ID_BITS) + torch.arange(
            values.shape[-1], device=values.device
        )
        ids = torch.topk(keys, self.n_top, dim=-1, largest=False).values & (2**_ID_BITS - 1)
        return ids, values.gather(-1, ids)


def plan_logprobs(rows: Sequence[SamplingRow], vocab: int, upload: Upload) -> LogprobsPlan | None:
    """``None`` where no row asks."""
    picked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not picked:
        return None
    n_top = min(max(rows[i].params.logprobs or 0 for i in picked), vocab)
    return LogprobsPlan(tuple(picked), upload.add(picked, torch.int64), n_top)


def raw_logprobs(row: SamplingRow, chosen: tuple[int, float], ids: np.ndarray, values: np.ndarray) -> RawLogprobs:
    """One row's outcome, from its ``best`` ids and values."""
    n = row.params.logprobs or 0
    pairs = zip(ids[:n].tolist(), values[:n].tolist(), strict=True)
    return RawLogprobs(chosen, tuple((int(i), value) for i, value in pairs if np.isfinite(value)))
