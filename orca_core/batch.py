"""One iteration's work, flattened: the rows of all chosen requests one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from orca_core.kv import KVManager
from orca_core.request import Request
from orca_core.staging import HostColumn, Upload

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each row


class Scheduled(NamedTuple):
    """The scheduler's choice for one request: compute its next ``n_tokens`` known tokens."""

    request: Request
    n_tokens: int


class Span(NamedTuple):
    """One request's rows in the flat batch.

    Rows ``start`` to ``start + n_tokens`` are its tokens at positions ``context - n_tokens`` to ``context``; row
    attends over the K and V of all positions up to its own. ``blocks``: the request's block table, which grows with it.
    ``samples``: the span reaches the newest known token, so a next token is sampled from its last row.
    """

    request: Request
    start: int
    n_tokens: int
    context: int
    blocks: Sequence[int]
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
    sampling_requests: list[Request] = field(init=False, repr=False)
    """The requests that get a token, in the order of ``sample_rows``."""

    def __post_init__(self) -> None:
        # once, since three ask for it; frozen for everybody else
        object.__setattr__(self, "sampling_requests", [span.request for span in self.spans if span.samples])

    @property
    def n_tokens(self) -> int:
        """Rows in the flat batch."""
        return int(self.tokens.shape[0])


class BatchBuilder:
    """Flattens the chosen requests of one iteration after the other.

    The values lie in the same memory each time: on a CPU a batch's tensors are good until the next one is built.
    """

    def __init__(self, kv: KVManager, device: torch.device) -> None:
        self._kv = kv
        self._device = device
        self._tokens, self._positions, self._slots, self._rows = (HostColumn(64) for _ in range(4))

    def build(self, chosen: Sequence[Scheduled]) -> Batch:
        """Take the requests' slots from the pool, and make a batch of their next tokens."""
        n_rows = sum([n_tokens for _, n_tokens in chosen])
        tokens, positions = self._tokens.reserve(n_rows), self._positions.reserve(n_rows)
        slots, rows = self._slots.reserve(n_rows), self._rows.reserve(len(chosen))
        extend = self._kv.extend_into
        spans: list[Span] = []
        start = n_samples = 0
        for request, n_tokens in chosen:
            first, ids = request.n_computed, request.token_ids
            context, end = first + n_tokens, start + n_tokens
            blocks = extend(request.request_id, n_tokens, slots, start)
            if n_tokens == 1:
                tokens[start], positions[start] = ids[first], first
            else:
                tokens[start:end] = array("q", ids[first:context])
                positions[start:end] = array("q", range(first, context))
            samples = context == len(ids)
            if samples:
                rows[n_samples] = end - 1
                n_samples += 1
            spans.append(_new(Span, (request, start, n_tokens, context, blocks, samples)))
            start = end
        columns = (self._tokens.first(n_rows), self._positions.first(n_rows), self._slots.first(n_rows))
        return self._sent(tuple(spans), *columns, self._rows.first(n_samples))

    def _sent(self, spans: tuple[Span, ...], *hosts: torch.Tensor) -> Batch:
        if self._device.type == "cpu":
            return Batch(spans, *hosts)
        upload = Upload(self._device)
        columns = [upload.add(host, torch.int64) for host in hosts]
        upload.send()
        return Batch(spans, *(column.tensor for column in columns))


def build_batch(chosen: Sequence[Scheduled], kv: KVManager, device: torch.device) -> Batch:
    """A single batch, in memory of its own."""
    return BatchBuilder(kv, device).build(chosen)
