"""Tiny random checkpoints, written by transformers itself, and a driver that runs a decoder without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from orca_core.attention.reference import ReferenceAttention
from orca_core.batch import Batch, Scheduled, build_batch
from orca_core.config import Quantization
from orca_core.kv import KVManager, KVPool
from orca_core.models import Decoder, load_model
from orca_core.request import Request
from orca_core.source import resolve_source
from orca_core.types import GenerationRequest

VOCAB_SIZE = 96
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
}  # fmt: skip
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip


def tiny_llama(**changes: Any) -> transformers.LlamaForCausalLM:
    """4 query heads share 2 key heads, each of size 12."""
    options = {**SHARED, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPES["default"]}
    return randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes})))


def tiny_qwen3(**changes: Any) -> transformers.Qwen3ForCausalLM:
    """6 query heads share 2 key heads, each of size 16, which is not hidden_size / heads."""
    options = {
        **SHARED, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    return randomised(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**options, **changes})))


def randomised(model: Any, norm_mean: float = 1.0) -> Any:
    """Norm weights and biases start as ones and zeros, which would hide a mix-up."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or ".ln_" in name
            mean, spread = (norm_mean, 0.3) if is_norm and name.endswith("weight") else (0.0, 0.25)
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def calmed(model: Any, factor: float = 0.4) -> Any:
    """With smaller projections. As they are, these models are so touchy that rounding in one layer changes the
    attention of the next by a few percent, and no tolerance tells a mistake from it.
    """
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and not any(part in key for part in ("embed", "wte", "wpe")):
                parameter.mul_(factor)
    return model


def load(
    path: Path, dtype: str = "float32", max_model_len: int | None = None, quantization: Quantization = "none"
) -> Decoder:
    """The decoder of this project for a folder or file."""
    return load_model(
        resolve_source(str(path)), dtype=dtype, device=torch.device("cpu"), max_model_len=max_model_len,
        quantization=quantization,
    )  # fmt: skip


class Driver:
    """Runs iterations over a decoder, choosing the rows by hand: what scheduler and executor do in an engine."""

    def __init__(self, decoder: Decoder, n_slots: int = 1024, block_size: int = 4, max_batch_size: int = 8) -> None:
        self.decoder = decoder
        self.kv = KVManager(n_slots, block_size, max_batch_size)
        self.pool = KVPool(decoder.kv_shape, self.kv.n_blocks, block_size, decoder.device)
        self.attention = ReferenceAttention()

    def start(self, request_id: str, prompt: Sequence[int], max_new_tokens: int = 64) -> Request:
        request = Request(GenerationRequest(request_id, tuple(prompt), max_new_tokens, seed=0), arrived_at=0.0)
        assert self.kv.reserve(request_id, request.total_tokens)
        request.admit(0.0)
        return request

    def end(self, request: Request) -> None:
        self.kv.release(request.request_id)
        request.finish()

    @torch.inference_mode()
    def logits(self, chosen: Sequence[tuple[Request, int]]) -> torch.Tensor:
        """One iteration over the next n tokens of each request; logits of every row."""
        batch = build_batch([Scheduled(request, n) for request, n in chosen], self.kv, self.decoder.device)
        hidden = self._forward(batch)
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def greedy(self, chosen: Sequence[tuple[Request, int]]) -> None:
        """One iteration; requests whose newest token was computed get the most likely next one."""
        batch = build_batch([Scheduled(request, n) for request, n in chosen], self.kv, self.decoder.device)
        hidden = self._forward(batch)
        if batch.sampling_requests:
            ids = self.decoder.logits(hidden[batch.sample_rows]).argmax(-1).tolist()
            for request, token_id in zip(batch.sampling_requests, ids, strict=True):
                request.append(token_id, 0.0)

    def _forward(self, batch: Batch) -> torch.Tensor:
        self.attention.prepare(batch)
        hidden = self.decoder.forward(batch, self.pool, self.attention)
        for span in batch.spans:
            span.request.advance(span.n_tokens)
        return hidden


def output(request: Request) -> list[int]:
    """The tokens generated so far."""
    return request.token_ids[request.n_prompt_tokens :]


def transformers_greedy(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """The oracle: exactly ``n`` greedy tokens, eos or not."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=n, min_new_tokens=n, eos_token_id=None,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), pad_token_id=0,
        )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


def transformers_logits(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """The oracle: logits of every position, ``[len(prompt), vocab]``."""
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)])).logits[0].float()
