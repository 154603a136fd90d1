"""The decoder against transformers, on tiny random checkpoints that transformers saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from orca_core.models import Decoder, read_shape
from orca_core.request import Request
from orca_core.source import resolve_source
from tests.core.tiny_families import VARIANTS, tiny_gemma3, tiny_gpt2, tiny_olmo2
from tests.core.tiny_models import (
    ROPES,
    VOCAB_SIZE,
    Driver,
    load,
    output,
    tiny_llama,
    tiny_qwen3,
    transformers_greedy,
    transformers_logits,
)


@dataclass(frozen=True)
class Pair:
    oracle: Any
    decoder: Decoder
    folder: Path


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = VARIANTS[request.param]()
    model.save_pretrained(folder)
    return Pair(model, load(folder), folder)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.1  # logits that are all alike would agree whatever the code does
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_whole_prompt(pair: Pair) -> None:
    ids = prompt(0, 120)
    driver = Driver(pair.decoder)
    assert_close(driver.logits([(driver.start("a", ids), 120)]), transformers_logits(pair.oracle, ids))


@pytest.mark.parametrize("pieces", [(1, 5, 4, 30, 1, 19), (4, 4, 4, 48), (59, 1), (1,) * 60])
def test_prompt_in_pieces(pair: Pair, pieces: tuple[int, ...]) -> None:
    ids = prompt(1, 60)
    driver = Driver(pair.decoder)
    request = driver.start("a", ids)
    ours = torch.cat([driver.logits([(request, n)]) for n in pieces])
    assert_close(ours, transformers_logits(pair.oracle, ids))


def test_several_requests_in_one_flat_batch(pair: Pair) -> None:
    """Whole prompts, pieces and single tokens side by side; blocks of the requests are interleaved in the pool."""
    prompts = [prompt(seed, length) for seed, length in ((2, 33), (3, 7), (4, 1), (5, 21))]
    driver = Driver(pair.decoder)
    requests = [driver.start(str(i), ids) for i, ids in enumerate(prompts)]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for pieces in ((10, 3, 1, 0), (1, 1, 0, 5), (20, 2, 0, 1), (2, 1, 0, 15)):
        chosen = [(i, n) for i, n in enumerate(pieces) if n]
        parts = driver.logits([(requests[i], n) for i, n in chosen]).split([n for _, n in chosen])
        for (i, _), part in zip(chosen, parts, strict=True):
            rows[i].append(part)
    for ids, parts in zip(prompts, rows, strict=True):
        assert_close(torch.cat(parts), transformers_logits(pair.oracle, ids))


def assert_greedy(oracle: Any, request: Request, n_tokens: int) -> None:
    """One pass of the oracle over prompt + answer: each token must be the most likely one after those before it. By
    induction that is the oracle's own greedy answer, at a tenth of the time it takes to generate it.
    """
    choices = transformers_logits(oracle, request.token_ids[:-1]).argmax(-1).tolist()
    assert len(output(request)) == n_tokens
    assert output(request) == choices[request.n_prompt_tokens - 1 :]


def test_greedy_single_request(pair: Pair) -> None:
    driver = Driver(pair.decoder)
    request = driver.start("a", prompt(6, 9))
    for _ in range(64):
        driver.greedy([(request, request.n_uncomputed)])
    assert_greedy(pair.oracle, request, 64)


def test_greedy_mixed_batch_whose_members_join_and_leave(pair: Pair) -> None:
    joins = {0: (7, 12, 64), 3: (8, 40, 64), 20: (9, 1, 64), 25: (10, 17, 30), 60: (11, 5, 64)}
    driver = Driver(pair.decoder, n_slots=400)
    running: dict[int, Request] = {}
    finished: dict[int, Request] = {}
    for iteration in range(200):
        if iteration in joins:
            seed, length, n = joins[iteration]
            running[seed] = driver.start(str(seed), prompt(seed, length), n)
        if running:
            # at most 6 tokens of a prompt at a time, so that pieces and increments share iterations
            driver.greedy([(request, min(6, request.n_uncomputed)) for request in running.values()])
        for seed, request in list(running.items()):
            if request.n_output_tokens == request.spec.max_new_tokens:
                driver.end(request)
                finished[seed] = running.pop(seed)
        driver.kv.check_integrity()
    driver.kv.check_integrity(idle=True)
    for seed, _, n in joins.values():
        assert_greedy(pair.oracle, finished[seed], n)


def test_the_oracle_itself_generates_what_its_logits_say(pair: Pair) -> None:
    """What ``assert_greedy`` leans on, checked once a variant over a few tokens and a cache of its own."""
    driver = Driver(pair.decoder)
    request = driver.start("a", prompt(12, 20), 8)
    for _ in range(8):
        driver.greedy([(request, request.n_uncomputed)])
    assert output(request) == transformers_greedy(pair.oracle, prompt(12, 20), 8)


def test_facts(pair: Pair) -> None:
    decoder, config = pair.decoder, pair.oracle.config
    assert decoder.n_parameters == sum(parameter.numel() for parameter in pair.oracle.parameters())
    assert decoder.config.architecture == type(pair.oracle).__name__
    assert decoder.kv_shape.n_layers == config.num_hidden_layers
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    n_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert decoder.kv_shape.bytes_per_slot == 2 * config.num_hidden_layers * n_kv_heads * head_dim * 4
    assert decoder.config.eos_ids == (2,)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_headers_alone_say_what_a_slot_holds(dtype: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    limit, shape = read_shape(resolve_source(str(tmp_path)), dtype=dtype, device=torch.device("cpu"))
    decoder = load(tmp_path, dtype)
    assert (limit, shape) == (decoder.config.max_position_embeddings, decoder.kv_shape)


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert not (tmp_path / "many" / "model.safetensors").exists()
    ids = prompt(0, 20)
    results = []
    for name in ("one", "many"):
        driver = Driver(load(tmp_path / name))
        results.append(driver.logits([(driver.start("a", ids), 20)]))
    assert torch.equal(*results)


def test_old_style_rope_fields(tmp_path: Path) -> None:
    """Before transformers 5 there were ``rope_theta`` and ``rope_scaling`` with ``type``."""
    model = tiny_llama(rope_parameters=ROPES["linear"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"]
    values |= {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}}
    file.write_text(json.dumps(values))
    driver = Driver(load(tmp_path))
    ids = prompt(0, 50)
    assert_close(driver.logits([(driver.start("a", ids), 50)]), transformers_logits(model, ids))


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_olmo2, tiny_gemma3, tiny_gpt2])
def test_bfloat16_equals_transformers_bfloat16_within_its_precision(build: Any, tmp_path: Path) -> None:
    model = build().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path, "bfloat16")
    assert decoder.dtype == torch.bfloat16
    ids = prompt(0, 40)
    driver = Driver(decoder)
    ours, exact = driver.logits([(driver.start("a", ids), 40)]), transformers_logits(model.float(), ids)
    theirs = transformers_logits(model.to(torch.bfloat16), ids)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
