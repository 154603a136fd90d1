"""One iteration's work, flattened: the rows of all chosen requests one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from orca_core.kv import KVManager
from orca_core.request import Request
from orca_core.staging import Upload


class Scheduled(NamedTuple):
    """The scheduler's choice for one request: compute its next ``n_tokens`` known tokens."""

    request: Request
    n_tokens: int


class Span(NamedTuple):
    """One request's rows in the flat batch.

    Rows ``start`` to ``start + n_tokens`` are its tokens at positions ``context - n_tokens`` to ``context``; row
    attends over the K and V of all positions up to its own. ``blocks``: the request's block table. ``samples``: the
    span reaches the newest known token, so a next token is sampled from its last row.
    """

    request: Request
    start: int
    n_tokens: int
    context: int
    blocks: tuple[int, ...]
    samples: bool

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + self.n_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat batch of selective batching (Orca section 3.2): everything but attention sees one ``[n_tokens]`` tensor.

    ``tokens``, ``positions``, ``slots``: int64 ``[n_tokens]`` on the device; ``slots``: where each row's K and V go.
    ``sample_rows``: int64, the rows from which a token is sampled, in the order of the spans that sample.
    """

    spans: tuple[Span, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_rows: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """Rows in the flat batch."""
        return int(self.tokens.shape[0])

    @property
    def sampling_requests(self) -> list[Request]:
        """The requests that get a token, in the order of ``sample_rows``."""
        return [span.request for span in self.spans if span.samples]


def build_batch(chosen: Sequence[Scheduled], kv: KVManager, device: torch.device) -> Batch:
    """Flatten the chosen requests and take their slots from the pool."""
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for item in chosen:
        request, first = item.request, item.request.n_computed
        context = first + item.n_tokens
        start = len(tokens)
        tokens += request.token_ids[first:context]
        positions += range(first, context)
        slots += kv.extend(request.request_id, item.n_tokens)
        samples = context == len(request.token_ids)
        spans.append(Span(request, start, item.n_tokens, context, kv.blocks(request.request_id), samples))
    rows = [span.end - 1 for span in spans if span.samples]
    upload = Upload(device)
    columns = [upload.add(values, torch.int64) for values in (tokens, positions, slots, rows)]
    upload.send()
    return Batch(tuple(spans), *(column.tensor for column in columns))
