"""The structures of ``src/api.h``, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p


class CFormat(ctypes.Structure):
    """``orca_format``."""

    _fields_ = (("bits", c_int32), ("grouped", c_int32), ("with_minimum", c_int32))


class CLinear(ctypes.Structure):
    """``orca_linear``."""

    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("n_out", c_int64), ("n_in", c_int64), ("format", CFormat),
    )  # fmt: skip


class CSpans(ctypes.Structure):
    """``orca_spans``."""

    _fields_ = (("spans", c_void_p), ("table", c_void_p), ("n_spans", c_int32), ("block_size", c_int32))


class CHeads(ctypes.Structure):
    """``orca_heads``."""

    _fields_ = (("n_heads", c_int32), ("n_kv_heads", c_int32), ("head_dim", c_int32))


class CAttentionSpec(ctypes.Structure):
    """``orca_attention_spec``."""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int32))


class CLayer(ctypes.Structure):
    """``orca_layer``."""

    _fields_ = (
        ("qkv", CLinear), ("output", CLinear), ("gate_up", CLinear), ("down", CLinear),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("attention", CAttentionSpec), ("rope", c_int32),
    )  # fmt: skip


class CModel(ctypes.Structure):
    """``orca_model``."""

    _fields_ = (
        ("layers", POINTER(CLayer)), ("head", CLinear), ("embedding", CLinear), ("norm", c_void_p),
        ("heads", CHeads), ("n_layers", c_int32), ("eps", c_float), ("embedding_scale", c_float),
    )  # fmt: skip


class CRope(ctypes.Structure):
    """``orca_rope``."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("rotated", c_int32))


class CTimes(ctypes.Structure):
    """``orca_times``: seconds."""

    _fields_ = (("linear", c_double), ("attention", c_double), ("rows", c_double), ("all", c_double))


class CBatch(ctypes.Structure):
    """``orca_batch``."""

    _fields_ = (
        ("tokens", c_void_p), ("slots", c_void_p), ("ropes", POINTER(CRope)), ("spans", CSpans),
        ("sample_rows", c_void_p), ("sample_spans", c_void_p), ("logits", c_void_p), ("n_rows", c_int64),
        ("n_samples", c_int32), ("n_threads", c_int32), ("times", POINTER(CTimes)),
    )  # fmt: skip
