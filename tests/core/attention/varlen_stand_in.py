"""``varlen_attn`` without a GPU: the same signature and refusals, computed in plain torch, one row at a time."""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import AuxRequest

HALF = (torch.float16, torch.bfloat16)


def check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(message)


class VarlenStandIn:
    """``page_multiple`` and ``dtypes`` are looser than the real ones only where a test says so.

    The refusals are those of ``varlen_attn`` itself and of ``mha_varlen_fwd`` in ATen's ``flash_api.cpp``, which reads
    only ``seqused_k[i]`` tokens of context of the pages that row i of the block table names.
    """

    def __init__(self, page_multiple: int = 256, dtypes: tuple[torch.dtype, ...] = HALF) -> None:
        self._page_multiple = page_multiple
        self._dtypes = dtypes
        self.calls: list[tuple[int, int, tuple[int, int], bool, int | None]] = []  # max_q, max_k, window, gqa, splits

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
        assert return_aux is None, "the stand-in has no log-sum-exp"
        assert block_table is not None, "the stand-in is paged"
        assert seqused_k is not None, "block_table requires seqused_k"
        n_heads, n_kv_heads = query.size(1), key.size(2)
        if not enable_gqa and n_heads != n_kv_heads:
            raise ValueError("Expect query and key/value to have the same number of heads")
        self._check_tensors(query, key, value)
        self._check_tables(cu_seq_q, cu_seq_k, seqused_k, block_table)
        self._check_values(query, key, cu_seq_q, seqused_k, block_table, max_q, max_k)
        self.calls.append((max_q, max_k, window_size, enable_gqa, num_splits))
        left, right = window_size
        out = torch.empty_like(query)
        pages = block_table.long()
        for i, context in enumerate(seqused_k.tolist()):
            k = key[pages[i]].flatten(0, 1)[:context].float().repeat_interleave(n_heads // n_kv_heads, 1)
            v = value[pages[i]].flatten(0, 1)[:context].float().repeat_interleave(n_heads // n_kv_heads, 1)
            first, last = int(cu_seq_q[i]), int(cu_seq_q[i + 1])
            for row in range(first, last):
                at = context - (last - row)  # aligned at the bottom right
                low = 0 if left < 0 else max(0, at - left)
                high = context if right < 0 else min(context, at + right + 1)
                scores = torch.einsum("hd,khd->hk", query[row].float(), k[low:high])
                weights = (scores * (scale or query.size(-1) ** -0.5)).softmax(-1)
                out[row] = torch.einsum("hk,khd->hd", weights, v[low:high]).to(out.dtype)
        return out

    def _check_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        check(query.dtype in self._dtypes, "FlashAttention only support fp16 and bf16 data type")
        check(key.dtype == value.dtype == query.dtype, "query and key must have the same dtype")
        check(query.dim() == 3 and key.dim() == 4, "q must be 3-dimensional, a paged k 4-dimensional")
        check(key.shape == value.shape and key.size(3) == query.size(2), "k and v must have the shape of the pool")
        check(all(t.stride(-1) == 1 for t in (query, key, value)), "Input tensor must have contiguous last dimension")
        check(key.size(1) % self._page_multiple == 0, "Paged KV cache block size must be divisible by 256")
        check(query.size(2) <= 256 and query.size(2) % 8 == 0, "head dimension at most 256, a multiple of 8")
        check(query.size(1) % key.size(2) == 0, "Number of heads in key/value must divide number of heads in query")

    @staticmethod
    def _check_tables(
        cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None, seqused_k: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        check(cu_seq_k is not None, "FlashAttention 2 takes cu_seq_k beside a block table")
        assert cu_seq_k is not None
        n = cu_seq_q.numel() - 1
        check(n > 0, "batch size must be positive")
        tables = (cu_seq_q, cu_seq_k, seqused_k, block_table)
        check(all(t.dtype == torch.int32 for t in tables), "index tensors must have dtype int32")
        check(all(t.is_contiguous() for t in tables[:3]), "cu_seqlens and seqused_k must be contiguous")
        check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        check(cu_seq_q.shape == cu_seq_k.shape == (n + 1,), "cu_seqlens must have shape (batch_size + 1)")
        check(seqused_k.shape == (n,) and block_table.shape[:1] == (n,), "seqused_k, block_table: one row a sequence")

    @staticmethod
    def _check_values(
        query: torch.Tensor, key: torch.Tensor, cu_seq_q: torch.Tensor, seqused_k: torch.Tensor,
        block_table: torch.Tensor, max_q: int, max_k: int,
    ) -> None:  # fmt: skip
        """What the kernel takes on trust, and would answer with wrong numbers or a fault."""
        n_rows = cu_seq_q.diff()
        assert (int(cu_seq_q[0]), int(cu_seq_q[-1])) == (0, query.size(0))
        assert int(n_rows.min()) >= 1, "a span without rows"
        assert int(n_rows.max()) <= max_q, "max_q is too small"
        assert bool((seqused_k >= n_rows).all()), "more rows than context"
        assert int(seqused_k.max()) <= min(max_k, block_table.size(1) * key.size(1)), "max_k or the table is too small"
        assert 0 <= int(block_table.min()) <= int(block_table.max()) < key.size(0), "a block that is not there"
