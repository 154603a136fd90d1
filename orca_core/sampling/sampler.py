"""The sampler: which rows need what."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orca_core.sampling.changes import apply_changes
from orca_core.sampling.draw import draw, draw_filtered
from orca_core.sampling.rows import RawLogprobs, SampledToken, SamplingRow


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token for each row of ``logits`` (float32 ``[n, vocab]``, any device, not modified).

    A batch of greedy rows costs one argmax. A row that is unsound (see ``SampledToken``) disturbs no other.
    """
    changed = apply_changes(logits, rows)
    chosen, peaks = _most_likely(changed)
    # NaN and inf win a search for the largest, and -inf does only where everything is ruled out
    sound = torch.isfinite(peaks)
    if changed is not logits:
        sound &= torch.isfinite(_most_likely(logits)[1])
    is_sound = sound.squeeze(-1).tolist()
    for with_filter, choose in ((False, draw), (True, draw_filtered)):
        picked = [
            i for i, row in enumerate(rows) if is_sound[i] and not row.is_greedy and row.has_filter is with_filter
        ]
        if picked:
            index = torch.tensor(picked, device=logits.device)
            chosen[index] = choose(changed[index], peaks[index], [rows[i] for i in picked])
    ids = chosen.tolist()
    return [
        SampledToken(ids[i], True, _logprobs(logits[i], row, ids[i])) if is_sound[i] else SampledToken(0, ok=False)
        for i, row in enumerate(rows)
    ]


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Id ``[n]`` and logit ``[n, 1]`` of each row's largest; of equals, the lowest id."""
    ids = logits.argmax(dim=-1)
    return ids, logits.gather(-1, ids.unsqueeze(-1))


def _logprobs(logits: torch.Tensor, row: SamplingRow, token_id: int) -> RawLogprobs | None:
    """From raw logits ``[vocab]``; ``None`` where the row asks for none. Equal ones come in order of their ids."""
    if row.params.logprobs is None:
        return None
    n = min(row.params.logprobs, logits.shape[-1])
    values = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if n:
        least = torch.topk(values, n).values[-1]
        candidates = ((values >= least) & torch.isfinite(values)).nonzero().squeeze(-1)
        order = torch.sort(values[candidates], descending=True, stable=True).indices[:n]
        ids = candidates[order]
        top = tuple(zip(ids.tolist(), values[ids].tolist(), strict=True))
    return RawLogprobs((token_id, float(values[token_id])), top)
