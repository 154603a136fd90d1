"""How far a model's logits on this CPU lie from those of float32: the arithmetic, and the rounding of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

from deployment.bench.perplexity import MAX_BATCH, read_aloud, windows
from deployment.bench.perplexity import TEXT as FIRST_CHAPTER
from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Scheduled, build_batch
from orca_core.config import Quantization
from orca_core.cpu import Compute, choose_compute
from orca_core.kv import KVManager, KVPool
from orca_core.models import Decoder, load_model
from orca_core.quantised import QuantisedWeight
from orca_core.request import Request
from orca_core.source import ModelSource
from orca_core.types import GenerationRequest

TEXTS: Final = (FIRST_CHAPTER, Path(__file__).parent / "accuracy.txt")
"""The first two chapters of Pride and Prejudice (Jane Austen, 1813)."""
MAX_ERROR: Final = 1e-2
"""Of bfloat16: what is allowed of ‖Δlogits‖ / ‖logits‖."""
MIN_AGREEMENT: Final = 0.98
"""Of bfloat16: part of the positions whose likeliest token must be that of float32."""
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Against one float32 oracle, over ``n_positions`` of a text.

    ``error``: ‖Δlogits‖ / ‖logits‖ of all positions together, ``worst_error``: of the worst one. ``agreement``: part
    of the positions whose likeliest token is the oracle's; ``worst_gap``: among the others, by how much the oracle
    prefers its own, at most, in logits.
    """

    n_positions: int
    error: float
    worst_error: float
    agreement: float
    worst_gap: float

    def misses(self) -> list[str]:
        """The targets of bfloat16 that are missed, and by how much."""
        missed = []
        if not self.error <= MAX_ERROR:
            missed.append(f"the error of the logits is {self.error:.2%}, {MAX_ERROR:.0%} is allowed")
        if not self.agreement >= MIN_AGREEMENT:
            missed.append(f"{self.agreement:.2%} agree on the likeliest token, {MIN_AGREEMENT:.0%} must")
        return missed


@dataclass(frozen=True, slots=True)
class Found:
    """One quantisation. ``arithmetic``: against float32 over the same (rounded) weights; ``whole``: against float32
    over the weights of the file, so with what rounding them costs.
    """

    quantization: Quantization
    decoder: str
    dtype: str
    arithmetic: Accuracy
    whole: Accuracy

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def pieces_of(ids: Sequence[int], n_positions: int) -> list[tuple[int, ...]]:
    """As many pieces as are read side by side, ``n_positions`` in all, or what the text has; all equally long."""
    length = min(-(-n_positions // MAX_BATCH) + 1, max(2, len(ids) // MAX_BATCH))
    return windows(ids, length)[:MAX_BATCH]


def measure_found(
    source: ModelSource, ours: Compute, quantization: Quantization, pieces: Sequence[Sequence[int]]
) -> Found:
    """Both accuracies of a model that was loaded from ``source`` with ``quantization``."""
    dtype = ours.decoder.dtype
    same = _oracle(source, quantization)
    for weight in same.weights.tensors():
        if not isinstance(weight, QuantisedWeight):
            weight.copy_(weight.to(dtype))
    if same.is_quantised:  # or it would be dequantised in each iteration
        same = Decoder(same.config, same.weights.dequantised())
    arithmetic = measure_accuracy(ours, same, pieces)
    del same
    whole = measure_accuracy(ours, _oracle(source, "none"), pieces)
    name = str(dtype).removeprefix("torch.")
    return Found(quantization, type(ours.decoder).__name__, name, arithmetic, whole)


def load_ours(source: ModelSource, quantization: Quantization) -> Compute:
    """In bfloat16, in the CPU kernels where they compute the model."""
    return choose_compute(load_model(source, dtype="bfloat16", device=_CPU, quantization=quantization))


def _oracle(source: ModelSource, quantization: Quantization) -> Decoder:
    return load_model(source, dtype="float32", device=_CPU, quantization=quantization)


@torch.inference_mode()
def measure_accuracy(ours: Compute, oracle: Decoder, pieces: Sequence[Sequence[int]]) -> Accuracy:
    """Both read the same text: ``ours`` as increments side by side, ``oracle`` (torch, float32) each piece at once."""
    differences, lengths, gaps = [], [], []
    hidden = [_hidden(oracle, piece[:-1]) for piece in pieces]
    for place, (got, _) in enumerate(read_aloud(ours.decoder, ours.attention, pieces)):
        exact = oracle.logits(torch.stack([rows[place] for rows in hidden if place < len(rows)]))
        differences.append((got - exact).norm(dim=1))
        lengths.append(exact.norm(dim=1))
        gaps.append(exact.amax(1) - exact.gather(1, got.argmax(1, keepdim=True)).squeeze(1))
    difference, length, gap = torch.cat(differences), torch.cat(lengths), torch.cat(gaps)
    return Accuracy(
        len(gap), float(difference.norm() / length.norm()), float((difference / length).max()),
        float((gap == 0).double().mean()), float(gap.max()),
    )  # fmt: skip


def _hidden(oracle: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """Rows ``[n_tokens, hidden]`` of a text, from which its logits follow: these would fill the memory."""
    kv = KVManager(len(ids) + 1, len(ids), 1)
    request = Request(GenerationRequest("oracle", tuple(ids), 1, seed=0), 0.0)
    kv.reserve(request.request_id, request.total_tokens)
    request.admit(0.0)
    attention, pool = ReferenceAttention(), KVPool(oracle.kv_shape, kv.n_blocks, kv.block_size, oracle.device)
    batch = build_batch([Scheduled(request, len(ids))], kv, oracle.device)
    attention.prepare(batch)
    return oracle.forward(batch, pool, attention)


def misses(found: Sequence[Found]) -> list[str]:
    """Targets that the arithmetic misses in any form of the weights, and bfloat16 weights with their rounding."""
    lines = []
    for each in found:
        lines += [f"{each.quantization}, the same weights: {line}" for line in each.arithmetic.misses()]
        if each.quantization == "none":
            lines += [f"{each.quantization}, the file's weights: {line}" for line in each.whole.misses()]
    return lines


def accuracy_table(found: Sequence[Found]) -> Table:
    """Two rows a quantisation."""
    title = f"logits of {found[0].whole.n_positions} positions against float32"
    table = Table(title=title, box=None, header_style="bold")
    for name in ("weights", "oracle's weights", "error", "worst", "same first", "gap"):
        table.add_column(name, justify="left" if "weights" in name else "right")
    for each in found:
        for name, accuracy in (("the same", each.arithmetic), ("the file's", each.whole)):
            table.add_row(
                each.quantization, name, f"{accuracy.error:.2%}", f"{accuracy.worst_error:.2%}",
                f"{accuracy.agreement:.2%}", f"{accuracy.worst_gap:.3f}",
            )  # fmt: skip
    return table
