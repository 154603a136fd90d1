"""Logits and rows for tests of the sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from orca_core import sampling
from orca_core.kernels import Kernels
from orca_core.params import SamplingParams
from orca_core.sampling import SampledToken, SamplingRow

VOCAB = 61
INF = float("inf")


def random_logits(n: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(
    seed: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: frozenset[int] = frozenset(),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, position, prompt, output, banned)


class Way:
    """How ``sample`` draws: ``None`` = in torch."""

    kernels: Kernels | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    logits = logits if Way.kernels is None else logits.contiguous()
    return sampling.sample(logits, rows, Way.kernels)


def one(logits: torch.Tensor, r: SamplingRow) -> SampledToken:
    (token,) = sample(logits, [r])
    return token


def draws(logits: torch.Tensor, n: int, **params: Any) -> Counter[int]:
    """Tokens of n positions that all have the same logits ``[1, vocab]``."""
    rows = [row(seed=7, position=position, **params) for position in range(n)]
    return Counter(token.token_id for token in sample(logits.expand(n, -1), rows))


def kept(logits: torch.Tensor, n: int = 3000, **params: Any) -> set[int]:
    return set(draws(logits, n, **params))
