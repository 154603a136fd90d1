"""What a model loses when its weights are held in fewer bits: the perplexity of a fixed text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table
from torch.nn import functional as F

from orca_core.attention import AttentionBackend
from orca_core.batch import Scheduled, build_batch
from orca_core.config import Quantization
from orca_core.kv import KVManager, KVPool
from orca_core.models import AnyDecoder
from orca_core.request import Request
from orca_core.types import GenerationRequest

TEXT: Final = Path(__file__).parent / "perplexity.txt"
"""The first chapter of Pride and Prejudice (Jane Austen, 1813)."""
_BLOCK_SIZE: Final = 16
MAX_BATCH: Final = 16
"""Pieces side by side."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """e to the mean of -log p of ``n_tokens`` tokens. ``weight_bytes``: that an iteration reads."""

    quantization: Quantization
    decoder: str
    weight_bytes: int
    n_tokens: int
    perplexity: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def windows(ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """The text in pieces of ``length`` tokens; a last one of a single token is left out, since nothing follows it."""
    pieces = [tuple(ids[begin : begin + length]) for begin in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def measure_perplexity(
    decoder: AnyDecoder, attention: AttentionBackend, pieces: Sequence[Sequence[int]], quantization: Quantization
) -> Perplexity:
    """Of all tokens of each of ``pieces`` but its first, computed as they are when text is generated: one by one.

    Raises ``ValueError`` where there is nothing to measure.
    """
    n_tokens = sum(len(piece) - 1 for piece in pieces)
    if n_tokens < 1:
        raise ValueError("the text has fewer than two tokens")
    loss = sum(
        _loss(decoder, attention, pieces[begin : begin + MAX_BATCH]) for begin in range(0, len(pieces), MAX_BATCH)
    )
    return Perplexity(quantization, type(decoder).__name__, decoder.weight_bytes, n_tokens, math.exp(loss / n_tokens))


def _loss(decoder: AnyDecoder, attention: AttentionBackend, pieces: Sequence[Sequence[int]]) -> float:
    """The sum of -log p of all tokens but the first of each piece."""
    return sum(
        float(F.cross_entropy(logits.to(torch.float64), following, reduction="sum"))
        for logits, following in read_aloud(decoder, attention, pieces)
    )


def read_aloud(
    decoder: AnyDecoder, attention: AttentionBackend, pieces: Sequence[Sequence[int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces as requests side by side, place by place. Call in inference mode.

    Yields logits, float32 ``[n, vocab]``, valid until the next ones, of the pieces that have a next token; and that
    token, int64 ``[n]``.
    """
    kv = KVManager(sum(len(piece) for piece in pieces), _BLOCK_SIZE, len(pieces))
    pool = KVPool(decoder.kv_shape, kv.n_blocks, _BLOCK_SIZE, decoder.device)
    running = []
    for i, piece in enumerate(pieces):
        request = Request(GenerationRequest(str(i), (piece[0],), len(piece) - 1, seed=0), 0.0)
        kv.reserve(request.request_id, request.total_tokens)
        request.admit(0.0)
        running.append((request, piece))
    for place in range(1, max(len(piece) for piece in pieces)):
        running = [(request, piece) for request, piece in running if place < len(piece)]
        batch = build_batch([Scheduled(request, 1) for request, _ in running], kv, decoder.device)
        logits = decoder.next_logits(batch, pool, attention)
        if logits is None:
            raise ValueError("no row of an increment was sampled from")
        yield logits, torch.tensor([piece[place] for _, piece in running], device=logits.device)
        for request, piece in running:
            request.advance(1)
            request.append(piece[place], 0.0)


def perplexity_table(found: Sequence[Perplexity]) -> Table:
    """One row a quantisation."""
    table = Table(title=f"{found[0].n_tokens} tokens")
    for name in ("weights", "decoder", "MiB", "perplexity", "against the first"):
        table.add_column(name, justify="left" if name in ("weights", "decoder") else "right")
    for each in found:
        change = each.perplexity / found[0].perplexity - 1
        table.add_row(
            each.quantization,
            each.decoder,
            f"{each.weight_bytes / 2**20:.0f}",
            f"{each.perplexity:.3f}",
            f"{change:+.2%}",
        )
    return table
