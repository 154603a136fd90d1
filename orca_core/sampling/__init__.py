"""Choosing the next tokens: a pure function of logits, parameters, seed and position.

Order of operations, as in vLLM and transformers: repetition penalty, presence and frequency penalty, logit bias, ban of
eos (``min_new_tokens``), temperature, top_k, top_p, min_p, draw.

A row's result is bit for bit the same alone and in any batch, on any row: each row takes a path that its own parameters
decide, randomness is a hash of (seed, position), and whatever is summed is summed in integers, where order is nothing.
"""

from __future__ import annotations

from orca_core.sampling.draw import uniform
from orca_core.sampling.rows import GREEDY_BELOW, RawLogprobs, SampledToken, SamplingRow
from orca_core.sampling.sampler import sample

__all__ = ["GREEDY_BELOW", "RawLogprobs", "SampledToken", "SamplingRow", "sample", "uniform"]
