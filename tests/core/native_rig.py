"""The CPU kernels for a test, and what runs iterations over a decoder by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from orca_core.attention import AttentionBackend
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Scheduled, build_batch
from orca_core.kernels import KernelError, Kernels, find_kernels
from orca_core.kernels.variants import VARIANTS, cpu_features, load_variant
from orca_core.kv import KVManager, KVPool
from orca_core.models import AnyDecoder
from orca_core.request import Request
from orca_core.types import GenerationRequest

CPU = torch.device("cpu")


def kernels_or_skip() -> Kernels:
    """Skips the test where CPU or compiler are missing, and only then: kernels that do not compile are a failure."""
    return _found(find_kernels)


def _found(find: Callable[[], Kernels]) -> Kernels:
    try:
        return find()
    except KernelError as error:
        if any(variant.needs <= cpu_features() for variant in VARIANTS) and "failed" in str(error):
            raise
        pytest.skip(str(error))


def every_variant() -> list[str]:
    """What this machine can compile and run; parameters of a test for which all must give the same."""
    return [variant.name for variant in VARIANTS if variant.needs <= cpu_features()] or ["none"]


def variant_or_skip(name: str) -> Kernels:
    """One of ``every_variant``; skips as ``kernels_or_skip`` does."""
    named = [each for each in VARIANTS if each.name == name]
    return _found(lambda: load_variant(named[0])) if named else kernels_or_skip()


def difference(ours: torch.Tensor, oracle: torch.Tensor) -> float:
    """Length of the difference over that of the oracle."""
    return float((ours.float() - oracle.float()).norm() / oracle.float().norm())


class Rig:
    """A decoder, its pool, and requests whose rows are chosen by hand."""

    def __init__(self, decoder: AnyDecoder, attention: AttentionBackend | None = None, block_size: int = 4) -> None:
        self.decoder = decoder
        self.attention = attention or ReferenceAttention()
        self.kv = KVManager(4096, block_size, 64)
        self.pool = KVPool(decoder.kv_shape, self.kv.n_blocks, block_size, CPU)
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.fill_(torch.nan)  # who reads what nobody wrote is found out

    def start(self, name: str, ids: Sequence[int], max_new_tokens: int = 1) -> Request:
        request = Request(GenerationRequest(name, tuple(ids), max_new_tokens, seed=0), arrived_at=0.0)
        assert self.kv.reserve(name, request.total_tokens)
        request.admit(0.0)
        return request

    @torch.inference_mode()
    def step(self, chosen: Sequence[tuple[Request, int]]) -> torch.Tensor | None:
        """One iteration over the next n tokens of each request; a copy of the logits."""
        batch = build_batch([Scheduled(request, n) for request, n in chosen], self.kv, CPU)
        logits = self.decoder.next_logits(batch, self.pool, self.attention)
        for span in batch.spans:
            span.request.advance(span.n_tokens)
        return None if logits is None else logits.clone()

    def logits(self, name: str, ids: Sequence[int], pieces: Sequence[int] = ()) -> torch.Tensor:
        """Of the last of ``ids``, ``[vocab]``; initiated whole or in pieces, alone."""
        request = self.start(name, ids)
        result = None
        for n in pieces or (len(ids),):
            result = self.step([(request, n)])
        self.kv.release(name)
        assert result is not None
        return result[0]
