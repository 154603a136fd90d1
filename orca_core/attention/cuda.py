"""Attention on a GPU: torch's own variable-length FlashAttention, straight from the paged pool.

Rules of ``torch.nn.attention.varlen.varlen_attn`` as of torch 2.13, read from its source: ``varlen.py``, and
``mha_varlen_fwd`` of ATen's ``flash_api.cpp``, which is FlashAttention 2, the implementation torch carries and uses
unless another one is activated. K and V are ``[n_pages, page_size, n_kv_heads, head_dim]``, the page size a multiple of
256; float16 or bfloat16; a head dimension of at most 256, a multiple of 8; compute capability 8.0 or newer; all index
tensors int32 and contiguous; ``cu_seq_k`` must be given beside ``block_table``, though ``seqused_k`` says what is read.
There is no soft cap.

``varlen_attn_out`` is not used: where one row a span makes the kernel regroup the heads (see ``attend``), it writes to
a regrouped copy of the tensor that was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from orca_core.attention.base import AttentionSpec
from orca_core.batch import Batch
from orca_core.kv import KVPool, KVShape
from orca_core.staging import Upload

_MAX_HEAD_DIM: Final = 256
_HEAD_DIM_MULTIPLE: Final = 8
_MIN_CAPABILITY: Final = (8, 0)
_DTYPES: Final = (torch.float16, torch.bfloat16)


class VarlenFunction(Protocol):
    """The signature of ``varlen_attn``."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: AuxRequest | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See ``torch.nn.attention.varlen``."""
        ...


@dataclass(frozen=True, slots=True)
class VarlenTables:
    """What all layers of one iteration share; all int32 on the device, for n spans.

    ``cu_seq_q``, ``cu_seq_k`` ``[n + 1]``: rows, and tokens of context, before each span. ``seqused_k`` ``[n]``: tokens
    of context. ``block_table`` ``[n, width]``: blocks of each span; what lies beyond its context is never read.
    ``max_q``: most rows of a span; ``max_k``: no context is longer.
    """

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_q: int
    max_k: int


class VarlenAttention:
    """``AttentionBackend`` that computes increments and pieces of prompts in one call a layer.

    ``num_splits`` is always 1. More, and torch's own choice, give wrong rows with a block table in torch 2.13
    (pytorch/pytorch#194167, pytorch/torchtitan#3235). And with 1 a row's attention does not depend on its batch, bit
    for bit as torch documents it, which seeds and resumed streams lean on. It costs speed where few requests have long
    contexts.
    """

    def __init__(self, block_size: int, device: torch.device, varlen: VarlenFunction = varlen_attn) -> None:
        self._block_size = block_size
        self._device = device
        self._varlen = varlen
        self._tables: VarlenTables | None = None

    def prepare(self, batch: Batch) -> None:
        """Build the tables of a batch on the host and send them down in one copy."""
        contexts = [span.context for span in batch.spans]
        n_rows = [span.n_tokens for span in batch.spans]
        upload = Upload(self._device)
        cu_seq_q = upload.add(running_total(n_rows), torch.int32)
        cu_seq_k = upload.add(running_total(contexts), torch.int32)
        seqused_k = upload.add(contexts, torch.int32)
        table = upload.add(self._block_table(batch, contexts), torch.int32)
        upload.send()
        self.use(
            VarlenTables(cu_seq_q.tensor, cu_seq_k.tensor, seqused_k.tensor, table.tensor, max(n_rows), max(contexts))
        )

    def use(self, tables: VarlenTables) -> None:
        """Attend by these tables until the next ``prepare``: those of a captured graph stay where they are."""
        self._tables = tables

    def attend(self, layer: int, q: torch.Tensor, pool: KVPool, batch: Batch, spec: AttentionSpec) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        tables = self._tables
        if tables is None or spec.softcap is not None:
            raise RuntimeError("attend before prepare, or with a soft cap")
        if spec.window is not None:
            window = (spec.window - 1, 0)  # torch counts the positions before a row's own
        else:
            # one row a span sees all its context anyway; said so, the kernel reads K and V once for a group of heads
            window = (-1, -1) if tables.max_q == 1 else (-1, 0)
        out = self._varlen(
            q,
            pool.keys[layer],
            pool.values[layer],
            tables.cu_seq_q,
            tables.cu_seq_k,
            tables.max_q,
            tables.max_k,
            scale=spec.scale,
            window_size=window,
            enable_gqa=q.shape[1] != pool.shape.n_kv_heads,
            seqused_k=tables.seqused_k,
            block_table=tables.block_table,
            num_splits=1,
        )
        return out if isinstance(out, torch.Tensor) else out[0]

    def _block_table(self, batch: Batch, contexts: Sequence[int]) -> np.ndarray:
        widths = [-(-context // self._block_size) for context in contexts]
        table = np.zeros((len(widths), max(widths)), np.int32)
        for row, width, span in zip(table, widths, batch.spans, strict=True):
            row[:width] = span.blocks[:width]
        return table


def running_total(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int32 ``[n + 1]``: 0, then the sum of the first 1, 2, … n counts."""
    total = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=total[1:])
    return total


def why_not_varlen(
    shape: KVShape, specs: Sequence[AttentionSpec], capability: tuple[int, int], *, has_flash: bool
) -> str | None:
    """Why a model's layers cannot run on ``varlen_attn`` there; ``None``: they can.

    ``capability``: of the GPU. ``has_flash``: this torch was built with FlashAttention.
    """
    if not has_flash:
        return "this build of torch has no FlashAttention"
    if capability < _MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if shape.dtype not in _DTYPES:
        return f"K and V in {str(shape.dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % _HEAD_DIM_MULTIPLE:
        return f"a head dimension of {shape.head_dim}, not a multiple of 8 up to {_MAX_HEAD_DIM}"
    if any(spec.softcap is not None for spec in specs):
        return "attention scores with a soft cap"
    return None
