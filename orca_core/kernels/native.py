"""The kernels as Python sees them: torch tensors go in as pointers, and everything is checked before that."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from orca_core.kernels.spans import SpanTable
from orca_core.kernels.structs import CAttentionSpec, CBatch, CFormat, CHeads, CLinear, CModel
from orca_core.quantised import GROUP, Format, QuantisedWeight, Weight

_SIGNATURES: Final = (
    ("orca_packed_bytes", c_int64, (c_int64, c_int64, c_void_p)),
    ("orca_pack", c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32)),
    ("orca_pack_quantised", c_int32, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32,
                                      c_int32)),
    ("orca_apply", c_int32, (c_void_p, c_void_p, c_int64, c_void_p, c_int32)),
    ("orca_attend", c_int32, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64,
                           c_int32)),
    ("orca_forward", c_int32, (c_void_p, c_void_p)),
    ("orca_sample", c_int32, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32)),
    ("orca_logprobs", c_int32, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int32)),
    ("orca_advise", None, (c_void_p, c_int64)),
    ("orca_read_rate", c_double, (c_void_p, c_int64, c_int32, c_int32)),
    ("orca_product_rate", c_double, (c_int32,)),
)  # fmt: skip
_HALF_PANEL: Final = 16
DRAW: Final = np.dtype(
    [("temperature", "f4"), ("top_k", "i4"), ("top_p", "f8"), ("min_p", "f8"), ("point", "f8")]
)  # fmt: skip
"""``orca_draw``."""
_NO_MEMORY: Final = 1
_BFLOAT16: Final = Format(16, grouped=False)


@dataclass(frozen=True, slots=True)
class Heads:
    """How attention is divided. Query head h reads K/V head ``h // (n_heads // n_kv_heads)``."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A projection in the kernels' layout. ``weight``: bytes; ``bias``: float32 in the order of the packed columns.

    ``gated``: its first half are gates, its second half what they let through, laid side by side. ``format``: of the
    bytes; 16 bits are bfloat16.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    n_out: int
    n_in: int
    gated: bool
    format: Format = _BFLOAT16

    def c(self) -> CLinear:
        """The C structure. It points into these tensors, which must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return CLinear(self.weight.data_ptr(), bias, self.n_out, self.n_in, _c_format(self.format))


class Kernels:
    """A compiled library. Its functions let other Python threads run, and use up to ``torch.get_num_threads()``.

    Each may raise ``MemoryError``. Where the system gives no more threads they do with those there are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, result, arguments in _SIGNATURES:
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def pack(self, weight: Weight, bias: torch.Tensor | None = None, *, gated: bool = False) -> PackedLinear:
        """Pack ``weight`` ``[n_out, n_in]``, bfloat16 or quantised, ``n_in`` even, and ``bias`` ``[n_out]``.

        Raises ``ValueError``.
        """
        if isinstance(weight, QuantisedWeight):
            _check_quantised(weight)
        else:
            _check(weight, "weight", torch.bfloat16, 2)
        n_out, n_in = weight.shape
        if n_in % 2 or n_in == 0 or (gated and n_out % 2):
            raise ValueError(f"a weight of {n_out} x {n_in} cannot be packed")
        kind = weight.format if isinstance(weight, QuantisedWeight) else _BFLOAT16
        c_format = _c_format(kind)
        packed = torch.empty(self._library.orca_packed_bytes(n_out, n_in, byref(c_format)), dtype=torch.uint8)
        self.advise(packed)
        if isinstance(weight, QuantisedWeight):
            minima = None if weight.minima is None else weight.minima.data_ptr()
            _done(self._library.orca_pack_quantised(
                weight.integers.data_ptr(), weight.scales.data_ptr(), minima, packed.data_ptr(), n_out, n_in,
                byref(c_format), gated, torch.get_num_threads(),
            ))  # fmt: skip
        else:
            _done(self._library.orca_pack(
                weight.data_ptr(), packed.data_ptr(), n_out, n_in, gated, torch.get_num_threads()
            ))  # fmt: skip
        return PackedLinear(packed, None if bias is None else _pack_bias(bias, gated), n_out, n_in, gated, kind)

    def advise(self, memory: torch.Tensor) -> None:
        """Ask the system to keep ``memory`` in large pages."""
        self._library.orca_advise(memory.data_ptr(), memory.nbytes)

    def apply(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[n_rows, n_out]`` of bfloat16 ``x`` ``[n_rows, n_in]``. Raises ``ValueError``."""
        _check(x, "x", torch.bfloat16, 2)
        if x.shape[1] != linear.n_in or linear.gated:
            raise ValueError(f"rows of {x.shape[1]} do not fit a weight with {linear.n_in} columns")
        y = torch.empty(x.shape[0], linear.n_out, dtype=torch.float32)
        c = linear.c()
        _done(self._library.orca_apply(byref(c), x.data_ptr(), x.shape[0], y.data_ptr(), torch.get_num_threads()))
        return y

    def attend(
        self, table: SpanTable, heads: Heads, spec: CAttentionSpec, q: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of ``q`` ``[n_tokens, n_heads, head_dim]`` over a layer's pool, all bfloat16.

        ``keys``, ``values``: ``[n_blocks, block_size, n_kv_heads, head_dim]``. The table's numbers are not checked.
        Raises ``ValueError``.
        """
        shape = (heads.n_kv_heads, heads.head_dim)
        for name, pool in (("keys", keys), ("values", values)):
            _check(pool, name, torch.bfloat16, 4)
            if pool.shape[1] != table.block_size or pool.shape[2:] != shape:
                raise ValueError(f"{name} of {tuple(pool.shape)} do not fit {heads}")
        if q.dtype != torch.bfloat16 or q.shape[1:] != (heads.n_heads, heads.head_dim):
            raise ValueError(f"q is {q.dtype} {tuple(q.shape)}, which does not fit {heads}")
        if q.stride(2) != 1 or q.stride(1) != heads.head_dim:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        spans, c_heads = table.c(), CHeads(heads.n_heads, heads.n_kv_heads, heads.head_dim)
        _done(self._library.orca_attend(
            byref(spans), byref(c_heads), byref(spec), q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
            out.data_ptr(), out.stride(0), torch.get_num_threads(),
        ))  # fmt: skip
        return out

    def forward(self, model: CModel, batch: CBatch) -> None:
        """A whole iteration. Raises ``MemoryError``. What the structures point to is the caller's to get right."""
        _done(self._library.orca_forward(byref(model), byref(batch)))

    def sample(self, logits: torch.Tensor, draws: np.ndarray) -> tuple[list[int], list[bool]]:
        """Ids and soundness of each row of float32 ``logits`` ``[n, vocab]``.

        ``draws``: ``[n]`` of ``DRAW``. Raises ``ValueError`` and ``MemoryError``.
        """
        _check(logits, "logits", torch.float32, 2)
        n_rows, vocab = logits.shape
        if draws.dtype != DRAW or draws.shape != (n_rows,) or not draws.flags.c_contiguous or not vocab:
            raise ValueError(f"draws of {draws.dtype} {draws.shape} do not fit logits of {n_rows} x {vocab}")
        # of all ways to have a little memory with an address, the cheapest
        ids, sound = array("q", bytes(8 * n_rows)), array("B", bytes(n_rows))
        _done(self._library.orca_sample(
            logits.data_ptr(), n_rows, vocab, draws.ctypes.data, ids.buffer_info()[0], sound.buffer_info()[0],
            torch.get_num_threads(),
        ))  # fmt: skip
        return ids.tolist(), [ok != 0 for ok in sound]

    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, n_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-softmax of float32 ``logits`` ``[n, vocab]`` at int64 ``chosen`` ``[n]``; ids and values of the ``n_top``
        likeliest, ``[n, n_top]``. Raises ``ValueError`` and ``MemoryError``.
        """
        _check(logits, "logits", torch.float32, 2)
        _check(chosen, "chosen", torch.int64, 1)
        n_rows, vocab = logits.shape
        if chosen.shape[0] != n_rows or not 0 <= n_top <= vocab or not vocab:
            raise ValueError(f"{chosen.shape[0]} tokens and {n_top} best do not fit logits of {n_rows} x {vocab}")
        if n_rows and not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab:
            raise ValueError("a chosen token is outside the vocabulary")
        at_chosen, values = torch.empty(n_rows), torch.empty(n_rows, n_top)
        ids = torch.empty(n_rows, n_top, dtype=torch.int64)
        _done(self._library.orca_logprobs(
            logits.data_ptr(), n_rows, vocab, n_top, chosen.data_ptr(), at_chosen.data_ptr(), ids.data_ptr(),
            values.data_ptr(), torch.get_num_threads(),
        ))  # fmt: skip
        return at_chosen, ids, values

    def read_rate(self, memory: torch.Tensor, *, prefetch: bool, n_threads: int) -> float:
        """Bytes a second at which ``n_threads`` read ``memory``, once over."""
        rate: float = self._library.orca_read_rate(memory.data_ptr(), memory.nbytes, int(prefetch), n_threads)
        _done(0 if rate > 0 else _NO_MEMORY)
        return rate

    def product_rate(self, n_threads: int) -> float:
        """Floating-point operations a second of the bfloat16 product, out of the nearest cache."""
        rate: float = self._library.orca_product_rate(n_threads)
        _done(0 if rate > 0 else _NO_MEMORY)
        return rate


def _done(status: int) -> None:
    """What a native function returned. Raises ``MemoryError``, or ``RuntimeError`` for what nobody thought of."""
    if status == _NO_MEMORY:
        raise MemoryError("the kernels found no memory for what they work with")
    if status:
        raise RuntimeError("the kernels failed")


def _check(tensor: torch.Tensor, name: str, dtype: torch.dtype, n_dims: int) -> None:
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.dim() != n_dims or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous {dtype} with {n_dims} dimensions on the CPU")


def _check_quantised(weight: QuantisedWeight) -> None:
    """What the native code relies on. Raises ``ValueError``."""
    (n_out, n_in), kind = weight.shape, weight.format
    groups, dtype = (-(-n_in // GROUP), torch.float16) if kind.grouped else (1, torch.float32)
    _check(weight.integers, "integers", torch.int8 if kind.bits == 8 else torch.uint8, 2)
    _check(weight.scales, "scales", dtype, 2)
    if weight.minima is not None:
        _check(weight.minima, "minima", dtype, 2)
    fits = kind.bits in (4, 8) and (kind.grouped or not kind.with_minimum)
    fits &= (weight.minima is None) != kind.with_minimum
    fits &= weight.integers.shape == (n_out, n_in if kind.bits == 8 else (n_in + 1) // 2)
    fits &= all(each is None or each.shape == (n_out, groups) for each in (weight.scales, weight.minima))
    if not fits:
        raise ValueError(f"a quantised weight of {n_out} x {n_in} whose parts do not fit cannot be packed")


def _c_format(kind: Format) -> CFormat:
    return CFormat(kind.bits, kind.grouped, kind.with_minimum)


def _pack_bias(bias: torch.Tensor, gated: bool) -> torch.Tensor:
    wide = bias.to(torch.float32)
    if not gated:
        return wide.contiguous()
    half = wide.shape[0] // 2
    padded = torch.zeros(2, -(-half // _HALF_PANEL) * _HALF_PANEL)
    padded[:, :half] = wide.view(2, half)
    return padded.view(2, -1, _HALF_PANEL).transpose(0, 1).reshape(-1).contiguous()
