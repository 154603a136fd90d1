"""From chunks to a whole result, and the progress bar of ``Engine.generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.progress import Progress

from orca_core.errors import InternalError
from orca_core.types import GenerationChunk, GenerationRequest, GenerationResult, merge_chunks


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


@contextmanager
def progress_bar(n_total: int) -> Iterator[Callable[[], None]]:
    """Yields ``advance()``. Draws on stderr, and only where that is a terminal and there is more than one step."""
    if n_total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(transient=True) as progress:
        task = progress.add_task("generating", total=n_total)
        yield lambda: progress.advance(task)
