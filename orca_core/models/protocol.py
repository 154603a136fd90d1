"""What an executor needs of a decoder, whoever computes it."""

from __future__ import annotations

from typing import Protocol

import torch

from orca_core.attention.base import AttentionBackend
from orca_core.batch import Batch
from orca_core.kv import KVPool, KVShape
from orca_core.models.config import ModelConfig


class AnyDecoder(Protocol):
    """A loaded decoder-only transformer: in torch (``Decoder``) or in the CPU kernels (``NativeDecoder``)."""

    @property
    def config(self) -> ModelConfig:
        """What it was built from."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of K and V."""
        ...

    @property
    def kv_shape(self) -> KVShape:
        """What one slot of this model holds."""
        ...

    @property
    def n_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that an iteration reads: all but an embedding that is not the head as well."""
        ...

    def next_logits(self, batch: Batch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor | None:
        """Compute all rows of a batch, and write their K and V into the pool.

        Returns next-token logits, float32 ``[n_samples, vocab]`` in the order of ``batch.sample_rows``, valid until the
        next call; ``None`` where no row is sampled from.
        """
        ...
