"""Native kernels for CPUs: C++ that is compiled on first use, where there is a compiler and the instructions it needs.

``find_kernels`` gives them, or why there are none; then everything runs in torch.
"""

from __future__ import annotations

from orca_core.kernels.build import KernelError
from orca_core.kernels.native import DRAW, Heads, Kernels, PackedLinear
from orca_core.kernels.spans import SpanTable
from orca_core.kernels.variants import find_kernels

__all__ = ["DRAW", "Heads", "KernelError", "Kernels", "PackedLinear", "SpanTable", "find_kernels"]
