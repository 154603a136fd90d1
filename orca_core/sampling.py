"""Choosing the next tokens: a pure function of logits, parameters, seed and position.

Nothing here depends on a request's batch-mates: each row takes a path that its own parameters decide, every operation
runs along one row, and randomness is a hash of (seed, position), not a generator's state. Hence a request gets the
same tokens alone or in any batch, as long as its logits are the same.

Order of operations, as in vLLM and transformers: repetition penalty, frequency and presence penalty, logit bias, eos
ban (``min_new_tokens``), temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from orca_core.params import SamplingParams

GREEDY_BELOW: Final = 1e-5
"""A temperature below it is greedy: the distribution is a point within float32 anyway."""

_NUCLEUS_PREFIX: Final = 1024
"""top_p looks at the most likely tokens first; only a flat distribution needs all of them in order."""

_MASK64: Final = 2**64 - 1
_MINUS_INF: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with.

    ``position``: absolute index of the token that is chosen, so that a resumed request draws the same numbers.
    ``prompt_ids``, ``output_ids``: the tokens before it. ``banned_until_min``: ids that cannot be chosen before
    ``min_new_tokens``.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_until_min: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        """No randomness: the most likely token."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def has_filter(self) -> bool:
        """Some tokens are cut off before the draw."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def changes_logits(self) -> bool:
        """Penalties, bias or a ban."""
        p = self.params
        return bool(
            p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
            or p.logit_bias
            or (self.banned_until_min and len(self.output_ids) < p.min_new_tokens)
        )


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """(token id, natural log-probability) of the chosen token and of the most likely ones, best first."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's outcome. ``ok`` is False where the row's logits were not finite; ``token_id`` means nothing then."""

    token_id: int
    ok: bool = True
    logprobs: RawLogprobs | None = field(default=None)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token for each row of ``logits`` (float32 ``[n, vocab]``, not modified)."""
    # max carries NaN on, is +inf for +inf, and -inf only where nothing can be chosen
    finite = torch.isfinite(logits.amax(dim=-1))
    changed = _apply_changes(logits, rows)
    chosen = changed.argmax(dim=-1)  # the first of equals: the lowest id
    for with_filter in (False, True):
        picked = [i for i, row in enumerate(rows) if not row.is_greedy and row.has_filter is with_filter]
        if picked:
            index = torch.tensor(picked, device=logits.device)
            chosen[index] = _draw(changed[index], [rows[i] for i in picked], with_filter)
    ids, ok = chosen.tolist(), finite.tolist()
    logprobs = _logprobs(logits, rows, ids)
    return [SampledToken(ids[i], ok[i], logprobs.get(i) if ok[i] else None) for i in range(len(rows))]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from two 64-bit integers (splitmix64's finaliser, twice): the same on every machine."""
    x = _mix(_mix(seed & _MASK64) ^ (position & _MASK64))
    return (x >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


# ---- penalties, bias, ban


def _apply_changes(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits after penalties, bias and ban; ``logits`` itself where no row asks for any."""
    if not any(row.changes_logits for row in rows):
        return logits
    changed = logits.clone()
    for i, row in enumerate(rows):
        if row.changes_logits:
            _change_row(changed[i], row)
    return changed


def _change_row(x: torch.Tensor, row: SamplingRow) -> None:
    """Change one row ``[vocab]`` in place; touches only the ids that occur."""
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = _ids({*row.prompt_ids, *row.output_ids}, x)
        values = x[seen]
        x[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        counts = Counter(row.output_ids)
        times = torch.tensor(list(counts.values()), dtype=x.dtype, device=x.device)
        x[_ids(counts, x)] -= p.frequency_penalty * times + p.presence_penalty
    if p.logit_bias:
        x[_ids(p.logit_bias, x)] += torch.tensor(list(p.logit_bias.values()), dtype=x.dtype, device=x.device)
    if row.banned_until_min and len(row.output_ids) < p.min_new_tokens:
        x[_ids(row.banned_until_min, x)] = _MINUS_INF


def _ids(ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)


# ---- the draw


def _draw(x: torch.Tensor, rows: Sequence[SamplingRow], with_filter: bool) -> torch.Tensor:
    """One draw a row from ``[n, vocab]`` logits: the inverse of the cumulative distribution, in order of ids."""
    temperature = _column([row.params.temperature for row in rows], x)
    # relative to the largest, so that a small temperature cannot overflow
    x = (x - x.amax(dim=-1, keepdim=True)) / temperature
    probs = torch.softmax(_filter(x, rows) if with_filter else x, dim=-1)
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    points = _column([uniform(row.seed, row.position) for row in rows], cumulative)
    # the first id whose cumulative probability is above the point: never one of probability 0
    return (
        torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True).squeeze(-1).clamp(max=x.shape[-1] - 1)
    )


def _filter(x: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """-inf for what top_k, top_p and min_p cut off, one after the other. Tokens as likely as the last kept one stay."""
    vocab = x.shape[-1]
    ks = [min(row.params.top_k or vocab, vocab) for row in rows]
    largest_k = max((k for k in ks if k < vocab), default=0)
    if largest_k:
        best = torch.topk(x, largest_k, dim=-1).values
        limits = [best[i, k - 1] if k < vocab else best.new_tensor(_MINUS_INF) for i, k in enumerate(ks)]
        x = x.masked_fill(x < torch.stack(limits).unsqueeze(-1), _MINUS_INF)
    for i, row in enumerate(rows):
        if row.params.top_p < 1.0:
            x[i] = x[i].masked_fill(x[i] < _nucleus_limit(x[i], row.params.top_p), _MINUS_INF)
    if any(row.params.min_p for row in rows):
        # p >= min_p * max p, in logarithms: x was shifted so that the largest is 0
        limit = _column([row.params.min_p for row in rows], x).log()
        x = x.masked_fill(x < limit, _MINUS_INF)
    return x


def _nucleus_limit(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least logit of the smallest set of most likely tokens with a probability of ``top_p``; x: ``[vocab]``."""
    log_total = torch.logsumexp(x, dim=-1).to(torch.float64)
    best = x[:0]
    for n in (min(_NUCLEUS_PREFIX, x.shape[-1]), x.shape[-1]):
        best = torch.topk(x, n).values
        mass = (best.to(torch.float64) - log_total).exp().cumsum(dim=-1)
        reached = int(torch.searchsorted(mass, top_p))  # the first at which the mass is at least top_p
        if reached < n:
            return best[reached]
    return best[-1]  # rounding kept the whole just below top_p


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


# ---- log-probabilities


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], ids: Sequence[int]) -> dict[int, RawLogprobs]:
    """By row index, for the rows that ask: from the raw logits, before anything is applied to them."""
    found: dict[int, RawLogprobs] = {}
    for i, row in enumerate(rows):
        n = row.params.logprobs
        if n is None:
            continue
        logprobs = torch.log_softmax(logits[i], dim=-1)
        values, tokens = torch.topk(logprobs, min(n, logits.shape[-1]))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        found[i] = RawLogprobs((ids[i], float(logprobs[ids[i]])), top)
    return found
