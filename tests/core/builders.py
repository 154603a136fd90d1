"""Small builders shared by the tests of the core."""

from __future__ import annotations

import itertools

from orca_core.request import Request
from orca_core.types import GenerationRequest, ModelInfo, SamplingParams

_ids = itertools.count()

INFO = ModelInfo("tiny", "LlamaForCausalLM", "float32", 100, 64, 128, (2,), False)


def make_spec(
    n_prompt: int = 3, max_new_tokens: int = 4, *, request_id: str = "", sampling: SamplingParams | None = None,
    timeout_s: float | None = None, first_id: int = 3,
) -> GenerationRequest:  # fmt: skip
    """A valid request of a given size."""
    ids = tuple(first_id + i % 7 for i in range(n_prompt))
    name = request_id or f"r{next(_ids)}"
    return GenerationRequest(name, ids, max_new_tokens, 0, sampling or SamplingParams(), timeout_s)


def make_state(n_prompt: int = 3, max_new_tokens: int = 4, *, request_id: str = "", at: float = 0.0) -> Request:
    """A waiting request of a given size."""
    return Request(make_spec(n_prompt, max_new_tokens, request_id=request_id), at)
