"""Increments replayed from graphs against the same batches computed layer by layer."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from orca_core.attention.cuda import VarlenAttention
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.executor import ModelExecutor
from orca_core.graphs import IncrementGraphs, bucket_sizes
from orca_core.kv import KVManager, KVPool
from orca_core.models import Decoder
from orca_core.params import SamplingParams
from orca_core.request import Request
from orca_core.types import GenerationRequest
from tests.core.attention.varlen_stand_in import VarlenStandIn
from tests.core.graph_stand_in import RerunGraphRunner
from tests.core.tiny_models import load, tiny_qwen3

CPU = torch.device("cpu")
BLOCK = 4
MAX_BATCH_SIZE = 6
MAX_CONTEXT = 40


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tmp_path_factory.mktemp("qwen3")
    tiny_qwen3().save_pretrained(path)
    return load(path)


class Twins:
    """The same requests in two pools: one executor with graphs, one as the oracle. No unwritten slot is a number."""

    def __init__(self, decoder: Decoder) -> None:
        self.kv = KVManager(MAX_BATCH_SIZE * MAX_CONTEXT, BLOCK, MAX_BATCH_SIZE)
        self.spare = self.kv.n_blocks
        self.pools = [KVPool(decoder.kv_shape, self.kv.n_blocks + 1, BLOCK, CPU) for _ in range(2)]
        for pool in self.pools:
            for tensor in (*pool.keys, *pool.values):
                tensor.fill_(math.nan)
        attention = VarlenAttention(BLOCK, CPU, VarlenStandIn(BLOCK, dtypes=(torch.float32,)))
        self.runner = RerunGraphRunner()
        self.graphs = IncrementGraphs(
            decoder, self.pools[0], attention, self.runner,
            max_batch_size=MAX_BATCH_SIZE, max_context=MAX_CONTEXT, spare_block=self.spare,
        )  # fmt: skip
        self.with_graphs = ModelExecutor(decoder, self.pools[0], attention, graphs=self.graphs)
        self.oracle = ModelExecutor(decoder, self.pools[1], ReferenceAttention())

    def start(self, name: str, n_prompt: int, sampling: SamplingParams | None = None) -> Request:
        ids = tuple(random.Random(name).choices(range(3, 90), k=n_prompt))
        request = Request(GenerationRequest(name, ids, MAX_CONTEXT - n_prompt, 7, sampling or SamplingParams()), 0.0)
        assert self.kv.reserve(name, request.total_tokens)
        request.admit(0.0)
        return request

    def end(self, request: Request) -> None:
        self.kv.release(request.request_id)
        request.finish()

    def batch(self, chosen: list[tuple[Request, int]]) -> Batch:
        return build_batch([Scheduled(request, n) for request, n in chosen], self.kv, CPU)

    def iterate(self, chosen: list[tuple[Request, int]]) -> None:
        """One iteration on both; what they sample must be the same token."""
        batch = self.batch(chosen)
        ours, theirs = self.with_graphs.run_iteration(batch), self.oracle.run_iteration(batch)
        assert [t.token_id for t in ours] == [t.token_id for t in theirs]
        assert all(t.ok for t in ours)
        for span in batch.spans:
            span.request.advance(span.n_tokens)
        for request, token in zip(batch.sampling_requests, ours, strict=True):
            request.append(token.token_id, 0.0)

    def assert_pools_agree(self) -> None:
        """Padding wrote to the spare block and nowhere else."""
        for mine, other in zip(
            (*self.pools[0].keys, *self.pools[0].values), (*self.pools[1].keys, *self.pools[1].values), strict=True
        ):
            torch.testing.assert_close(mine[: self.spare], other[: self.spare], equal_nan=True, atol=1e-4, rtol=1e-4)
            assert bool(other[self.spare].isnan().all())


@pytest.mark.parametrize(("limit", "sizes"), [
    (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (6, (1, 2, 4, 6)), (128, (1, 2, 4, 8, 16, 32, 64, 128)),
])  # fmt: skip
def test_buckets(limit: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(limit) == sizes


def test_requests_that_join_and_leave(decoder: Decoder) -> None:
    twins = Twins(decoder)
    assert twins.runner.n_captured == 4
    a, b, c = twins.start("a", 9), twins.start("b", 3), twins.start("c", 1)
    twins.iterate([(a, 9), (b, 3)])  # prompts: no graph
    assert twins.runner.replayed == []
    for _ in range(3):
        twins.iterate([(a, 1), (b, 1)])
    twins.iterate([(a, 1), (b, 1), (c, 1)])  # a prompt of one token is one row as well
    for _ in range(4):
        twins.iterate([(c, 1), (b, 1), (a, 1)])
    twins.end(b)
    d, e, f = (twins.start(name, n) for name, n in (("d", 12), ("e", 5), ("f", 2)))
    twins.iterate([(a, 1), (c, 1), (d, 12), (e, 5), (f, 2)])
    for _ in range(3):
        twins.iterate([(a, 1), (c, 1), (d, 1), (e, 1), (f, 1)])
    for request in (c, d, e, f):
        twins.end(request)
    for _ in range(5):  # alone again, in a bucket of one
        twins.iterate([(a, 1)])
    assert twins.runner.replayed == [2] * 3 + [4] * 5 + [6] * 3 + [1] * 5
    twins.assert_pools_agree()


def test_logits_are_those_of_the_plain_path(decoder: Decoder) -> None:
    twins = Twins(decoder)
    requests = [twins.start(str(i), 5 + 3 * i) for i in range(5)]
    twins.iterate([(request, request.n_prompt_tokens) for request in requests])
    batch = twins.batch([(request, 1) for request in requests])
    with torch.inference_mode():
        graphed = twins.graphs.run(batch).clone()
        attention = ReferenceAttention()
        attention.prepare(batch)
        plain = decoder.logits(decoder.forward(batch, twins.pools[1], attention))
    assert graphed.shape == plain.shape
    torch.testing.assert_close(graphed, plain, atol=1e-3, rtol=1e-4)


def test_a_request_at_its_longest(decoder: Decoder) -> None:
    twins = Twins(decoder)
    request = twins.start("long", MAX_CONTEXT - 3)
    twins.iterate([(request, MAX_CONTEXT - 3)])
    twins.iterate([(request, 1)])
    twins.iterate([(request, 1)])
    assert len(request.token_ids) == MAX_CONTEXT
    assert twins.runner.replayed == [1, 1]


def test_a_piece_of_one_row_that_samples_nothing(decoder: Decoder) -> None:
    """The last row a long prompt got in an iteration, beside others' increments, or alone."""
    twins = Twins(decoder)
    a, b = twins.start("a", 4), twins.start("b", 6)
    twins.iterate([(a, 4), (b, 2)])
    twins.iterate([(a, 1), (b, 1)])
    assert (a.n_output_tokens, b.n_output_tokens) == (2, 0)
    twins.iterate([(b, 1)])
    twins.iterate([(a, 1), (b, 2)])
    twins.iterate([(b, 1), (a, 1)])
    assert (a.n_output_tokens, b.n_output_tokens) == (4, 2)
    assert twins.runner.replayed == [2, 1, 2]
    twins.assert_pools_agree()


def test_sampling_parameters_work_over_a_graph(decoder: Decoder) -> None:
    twins = Twins(decoder)
    params = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, logprobs=2)
    a, b = twins.start("a", 4, params), twins.start("b", 4)
    twins.iterate([(a, 4), (b, 4)])
    for _ in range(8):
        twins.iterate([(a, 1), (b, 1)])


def test_a_batch_that_is_too_large_is_not_for_graphs(decoder: Decoder) -> None:
    twins = Twins(decoder)
    request = twins.start("a", 2)
    assert not twins.graphs.fits(twins.batch([(request, 2)]))
    span = twins.batch([(twins.start("b", 1), 1)]).spans[0]
    rows = torch.zeros(MAX_BATCH_SIZE + 1, dtype=torch.int64)
    assert not twins.graphs.fits(Batch((span,) * (MAX_BATCH_SIZE + 1), rows, rows, rows, rows))
