"""Flattening: what a batch says, and that the next one is built in the same memory."""

from __future__ import annotations

import pytest
import torch

from orca_core.batch import BatchBuilder, Scheduled
from orca_core.kv import KVManager
from orca_core.request import Request
from tests.core.builders import make_spec

CPU = torch.device("cpu")


@pytest.fixture
def kv() -> KVManager:
    return KVManager(1024, 4, 8)


def admitted(kv: KVManager, name: str, n_prompt: int) -> Request:
    request = Request(make_spec(n_prompt, 40, request_id=name), 0.0)
    assert kv.reserve(name, request.total_tokens)
    request.admit(0.0)
    return request


def test_pieces_and_increments_lie_one_after_the_other(kv: KVManager) -> None:
    a, b, c = admitted(kv, "a", 3), admitted(kv, "b", 9), admitted(kv, "c", 1)
    builder = BatchBuilder(kv, CPU)
    first = builder.build([Scheduled(a, 3), Scheduled(b, 5), Scheduled(c, 1)])
    ids = [*a.token_ids, *b.token_ids[:5], *c.token_ids]
    assert (first.tokens.tolist(), first.positions.tolist()) == (ids, [0, 1, 2, 0, 1, 2, 3, 4, 0])
    assert (first.sample_rows.tolist(), first.sampling_requests, first.n_tokens) == ([2, 8], [a, c], 9)
    assert [tuple(span)[1:4] for span in first.spans] == [(0, 3, 3), (3, 5, 5), (8, 1, 1)]
    for span in first.spans:
        span.request.advance(span.n_tokens)
    a.append(7, 0.0)
    c.append(8, 0.0)
    second = builder.build([Scheduled(a, 1), Scheduled(c, 1), Scheduled(b, 4)])
    assert second.tokens.tolist() == [7, 8, *b.token_ids[5:]]
    assert second.positions.tolist() == [3, 1, 5, 6, 7, 8]
    assert (second.sample_rows.tolist(), second.sampling_requests) == ([0, 1, 5], [a, c, b])
    slots = [span.blocks[p // 4] * 4 + p % 4 for span in second.spans for p in range(span.context - span.n_tokens,
             span.context)]  # fmt: skip
    assert second.slots.tolist() == slots


def test_in_steady_state_every_batch_has_the_same_tensors(kv: KVManager) -> None:
    requests = [admitted(kv, name, 1) for name in "abcd"]
    builder, seen = BatchBuilder(kv, CPU), []
    for token_id in range(30):
        batch = builder.build([Scheduled(request, 1) for request in requests])
        seen.append([batch.tokens, batch.positions, batch.slots, batch.sample_rows])
        for request in requests:
            request.advance(1)
            request.append(token_id, 0.0)
    assert all(ours is first for columns in seen for ours, first in zip(columns, seen[0], strict=True))
    assert seen[0][1].tolist() == [29] * 4


def test_columns_grow_with_a_long_prompt(kv: KVManager) -> None:
    short, long = admitted(kv, "short", 2), admitted(kv, "long", 700)
    builder = BatchBuilder(kv, CPU)
    builder.build([Scheduled(short, 1)])
    short.advance(1)
    batch = builder.build([Scheduled(short, 1), Scheduled(long, 700)])
    assert batch.tokens.tolist() == [short.token_ids[1], *long.token_ids]
    assert batch.positions.tolist() == [1, *range(700)]
    assert len(set(batch.slots.tolist())) == batch.n_tokens == 701
