"""What goes into the sampler with each row of logits, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from orca_core.params import SamplingParams

GREEDY_BELOW: Final = 1e-5
"""A temperature below it is greedy: but for exact ties, all of the probability is on one token anyway."""


class SamplingRow(NamedTuple):
    """What one row of logits is sampled with.

    ``position``: absolute index of the token that is chosen, so that a resumed request draws the same numbers.
    ``prompt_ids``, ``output_ids``: the tokens before it, all inside the vocabulary. ``banned_until_min``: ids that
    cannot be chosen while fewer than ``params.min_new_tokens`` tokens are out. A named tuple, since one is made for
    each token.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_until_min: frozenset[int] = frozenset()

    def __repr__(self) -> str:  # a repr ends up in logs: it must hold neither prompt nor answer
        return f"SamplingRow({self.params}, seed={self.seed}, position={self.position})"

    @property
    def is_greedy(self) -> bool:
        """No randomness: the most likely token."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def has_filter(self) -> bool:
        """Some tokens are cut off before the draw."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def bans(self) -> bool:
        """Some ids cannot be chosen yet."""
        return bool(self.banned_until_min) and len(self.output_ids) < self.params.min_new_tokens

    @property
    def changes_logits(self) -> bool:
        """Penalties, bias or a ban."""
        p = self.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalised or bool(p.logit_bias) or self.bans

    @property
    def asks_for_more(self) -> bool:
        """More than a draw from the logits as they are."""
        return self.params.logprobs is not None or self.changes_logits


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """(token id, natural log-probability) of the chosen token and of the most likely ones, best first.

    From the fp32 log-softmax of the raw logits. All are finite: tokens the model itself rules out are not listed.
    """

    chosen: tuple[int, float] = field(repr=False)
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)


class SampledToken(NamedTuple):
    """One row's outcome. ``ok`` is False where there was nothing sound to choose from (NaN or infinite logits, every
    token ruled out): that request must fail, alone, and ``token_id`` means nothing.
    """

    token_id: int
    ok: bool = True
    logprobs: RawLogprobs | None = None

    def __repr__(self) -> str:  # a repr ends up in logs: it must not hold an answer
        return f"SampledToken(ok={self.ok})"
