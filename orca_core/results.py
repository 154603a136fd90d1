"""From chunks to whole results, and the progress bar of ``Engine.generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.progress import Progress

from orca_core.channel import Channel
from orca_core.errors import InternalError, InvalidRequestError
from orca_core.prompts import Prompt
from orca_core.types import GenerationChunk, GenerationRequest, GenerationResult, SamplingParams, merge_chunks


class ResultBuilder:
    """Collects the chunks of one request."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._chunks: list[GenerationChunk] = []

    def extend(self, chunks: Iterable[GenerationChunk]) -> Self:
        """Add chunks; blocks as long as their source does, and raises its error."""
        self._chunks.extend(chunks)
        return self

    def build(self) -> GenerationResult:
        """The result. Raises ``InternalError`` where the last chunk did not say why the request ended."""
        request_id = self._request.request_id
        whole = merge_chunks(self._chunks or [GenerationChunk(request_id)])
        if whole.finish_reason is None or whole.usage is None or whole.timings is None:
            raise InternalError(request_id)
        return GenerationResult(
            request_id=request_id,
            prompt_token_ids=self._request.token_ids,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            usage=whole.usage,
            metrics=whole.timings,
            stop=whole.stop,
            logprobs=whole.logprobs,
        )


def pair_up(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its parameters: one for all, or one for each. Raises ``InvalidRequestError``."""
    if isinstance(prompts, str):
        raise InvalidRequestError("prompts", "must be a list of prompts, not one string")
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError("prompts", "must be a list of prompts")
    all_prompts = list(prompts)
    if isinstance(sampling, SamplingParams) or sampling is None:
        return [(prompt, sampling) for prompt in all_prompts]
    if not isinstance(sampling, Iterable):
        raise InvalidRequestError("sampling", "must be SamplingParams, or one for each prompt")
    each = list(sampling)
    if len(each) != len(all_prompts):
        raise InvalidRequestError("sampling", f"{len(each)} sampling parameters for {len(all_prompts)} prompts")
    return list(zip(all_prompts, each, strict=True))


def collect(
    requests: Sequence[GenerationRequest], channels: Sequence[Channel], advance: Callable[[], object]
) -> list[GenerationResult]:
    """The results of submitted requests, in their order. Blocks; calls ``advance`` for each.

    Raises the first request's error; the others are cancelled then.
    """
    results = []
    for channel in channels:
        channel.may_stall = False
    try:
        for request, channel in zip(requests, channels, strict=True):
            results.append(ResultBuilder(request).extend(channel).build())
            advance()
    finally:
        for channel in channels:
            channel.close()
    return results


@contextmanager
def progress_bar(n_total: int) -> Iterator[Callable[[], None]]:
    """Yields ``advance()``. Draws on stderr, and only where that is a terminal and there is more than one step."""
    if n_total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(transient=True) as progress:
        task = progress.add_task("generating", total=n_total)
        yield lambda: progress.advance(task)
