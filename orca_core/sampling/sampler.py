"""The sampler: which rows need what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from orca_core.kernels import DRAW, Kernels
from orca_core.sampling.changes import Changes
from orca_core.sampling.draw import Draw, native_draws, plan_draw, plan_filtered_draw
from orca_core.sampling.logprobs import LogprobsPlan, plan_logprobs, raw_logprobs
from orca_core.sampling.rows import RawLogprobs, SampledToken, SamplingRow
from orca_core.staging import Upload, read_back

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each token


@dataclass(frozen=True, slots=True)
class _Choice:
    """Where the rows stand, on the device: changed logits ``[n, vocab]``; chosen ids ``[n]``; ``peaks`` ``[n, 1]``, the
    largest logits; ``sound`` ``[n, 1]``.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    peaks: torch.Tensor
    sound: torch.Tensor

    def draw(self, plan: Draw) -> torch.Tensor | None:
        """Choose for the rows of a plan. An unsound row draws from zeros, which is safe, and is told apart later."""
        index = plan.index.tensor
        sound = self.sound.index_select(0, index)
        x = plan.scaled(self.logits.index_select(0, index), self.peaks.index_select(0, index), sound)
        ids, complete = plan.choose(x)
        self.chosen.index_copy_(0, index, ids)
        return None if complete is None else complete | ~sound.squeeze(-1)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], kernels: Kernels | None = None) -> list[SampledToken]:
    """One token for each row of ``logits`` (float32 ``[n, vocab]``, any device, not modified).

    What the rows ask for goes down in one copy and what was chosen comes up in one; only a filter that keeps more
    tokens than were looked at needs a second round. A batch of greedy rows costs one argmax. A row that is unsound (see
    ``SampledToken``) disturbs no other.

    ``kernels``: for logits on a CPU, draw in one pass a row, with the same outcome.
    """
    if not rows:
        return []
    if kernels is not None and not any(row.asks_for_more for row in rows):
        return _tokens(*kernels.sample(logits.contiguous(), native_draws(rows, logits.shape[-1])))
    vocab = logits.shape[-1]
    upload = Upload(logits.device)
    changes = Changes(rows, vocab, upload)
    if kernels is not None:
        asked = plan_logprobs(rows, vocab, upload)
        upload.send()
        return _draw_natively(logits, changes, rows, asked, kernels).tokens(rows, asked)
    plain = [i for i, row in enumerate(rows) if not row.is_greedy and not row.has_filter]
    filtered = [i for i, row in enumerate(rows) if not row.is_greedy and row.has_filter]
    draws = [plan_draw(rows, plain, upload)] if plain else []
    if filtered:
        draws.append(plan_filtered_draw(rows, filtered, vocab, upload))
    asked = plan_logprobs(rows, vocab, upload)
    upload.send()

    choice = _most_likely_of(logits, changes)
    complete = [choice.draw(draw) for draw in draws]
    found = _read(choice, logits, asked, complete[-1] if filtered else None)
    unfinished = [i for i, done in zip(filtered, found.complete, strict=True) if not done]
    if unfinished:
        upload = Upload(logits.device)
        draw = plan_filtered_draw(rows, unfinished, vocab, upload, whole=True)
        upload.send()
        choice.draw(draw)
        found = _read(choice, logits, asked, None)
    return found.tokens(rows, asked)


def _most_likely_of(logits: torch.Tensor, changes: Changes) -> _Choice:
    changed = changes.apply(logits)
    chosen, peaks = _most_likely(changed)
    # NaN and inf win a search for the largest, and -inf does only where everything is ruled out
    sound = torch.isfinite(peaks)
    if changed is not logits:
        sound &= torch.isfinite(_most_likely(logits)[1])
    return _Choice(changed, chosen, peaks, sound)


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Id ``[n]`` and logit ``[n, 1]`` of each row's largest; of equals, the lowest id."""
    if logits.device.type == "cpu":  # numpy's search is many times faster than torch's
        ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    else:
        ids = logits.argmax(dim=-1)
    return ids, logits.gather(-1, ids.unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class _Found:
    """What came up. ``complete``: of the filtered rows. ``chosen_logprobs``, ``top``: of the rows that asked."""

    chosen: np.ndarray
    sound: np.ndarray
    complete: np.ndarray
    chosen_logprobs: np.ndarray
    top_ids: np.ndarray
    top_values: np.ndarray

    def tokens(self, rows: Sequence[SamplingRow], asked: LogprobsPlan | None) -> list[SampledToken]:
        if asked is None:
            return _tokens(self.chosen.tolist(), self.sound.ravel().tolist())
        logprobs: dict[int, RawLogprobs] = {}
        for m, i in enumerate(asked.rows):
            chosen = (int(self.chosen[i]), float(self.chosen_logprobs[m]))
            logprobs[i] = raw_logprobs(rows[i], chosen, self.top_ids[m], self.top_values[m])
        return [
            SampledToken(int(token_id), True, logprobs.get(i)) if ok else SampledToken(0, ok=False)
            for i, (token_id, ok) in enumerate(zip(self.chosen.tolist(), self.sound.flat, strict=True))
        ]


def _tokens(ids: list[int], sound: list[bool]) -> list[SampledToken]:
    """Of rows without log-probabilities. From a GPU all numbers come as floats."""
    return [_new(SampledToken, (int(i) if ok else 0, bool(ok), None)) for i, ok in zip(ids, sound, strict=True)]


def _draw_natively(
    logits: torch.Tensor,
    changes: Changes,
    rows: Sequence[SamplingRow],
    asked: LogprobsPlan | None,
    kernels: Kernels,
) -> _Found:
    logits = logits.contiguous()
    changed = changes.apply(logits)
    ids, oks = kernels.sample(changed, native_draws(rows, logits.shape[-1]))
    chosen, sound = torch.tensor(ids), torch.tensor(oks)
    if changed is not logits:
        sound &= torch.tensor(kernels.sample(logits, np.zeros(len(rows), DRAW))[1])
    none = torch.empty(0)
    at_chosen, top_ids, top_values = none, none, none
    if asked is not None:
        index = asked.index.tensor
        at_chosen, top_ids, top_values = kernels.logprobs(logits[index], chosen[index], asked.n_top)
    return _Found(*(part.numpy() for part in (chosen, sound, none, at_chosen, top_ids, top_values)))


def _read(choice: _Choice, logits: torch.Tensor, asked: LogprobsPlan | None, complete: torch.Tensor | None) -> _Found:
    none = torch.empty(0, device=logits.device)
    chosen_logprobs, top_ids, top_values = none, none, none
    if asked is not None:
        values = asked.values(logits)
        ids = choice.chosen.index_select(0, asked.index.tensor).unsqueeze(-1)
        chosen_logprobs = values.gather(-1, ids).squeeze(-1)
        top_ids, top_values = asked.best(values)
    parts = (choice.chosen, choice.sound, none if complete is None else complete, chosen_logprobs, top_ids, top_values)
    return _Found(*read_back(parts))
