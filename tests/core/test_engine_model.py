"""The whole engine over a tiny model: loading, batching, chunked initiation, seeds, all against each request alone."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import ConfigError, InsufficientMemoryError, ModelLoadError
from orca_core.kv import KVPool
from orca_core.loader import pick_device
from orca_core.types import GenerationResult, SamplingParams
from orca_core.warmup import worst_batch
from tests.core.tiny_models import tiny_llama, tiny_qwen3, transformers_greedy
from tests.core.tiny_tokenizers import save_byte_level

N_VOCAB = 270


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    make = tiny_llama if request.param == "llama" else tiny_qwen3
    make(vocab_size=N_VOCAB).save_pretrained(path)
    save_byte_level(path)
    return path


def config(folder: Path, **changes: object) -> EngineConfig:
    settings = {"max_batch_size": 6, "max_batch_tokens": 40, "block_size": 4, "n_slots": 600, **changes}
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(config(folder)) as made:
        yield made


def prompts(n: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(n)
    return [[rng.randrange(3, N_VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def same(a: GenerationResult, b: GenerationResult) -> bool:
    return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


def test_32_prompts_of_mixed_lengths_equal_32_alone(engine: Engine) -> None:
    """Token for token, though they join and leave, and long ones are initiated in pieces."""
    rng = random.Random(5)
    each = [
        SamplingParams(
            max_new_tokens=rng.randint(1, 30), ignore_eos=True, seed=i, temperature=rng.choice([0.0, 0.0, 0.9])
        )
        for i in range(32)
    ]
    together = engine.generate(prompts(32), each)
    for prompt, params, result in zip(prompts(32), each, together, strict=True):
        assert same(result, engine.generate([prompt], params)[0])
        assert len(result.token_ids) == params.max_new_tokens


def test_greedy_is_what_transformers_says(folder: Path, engine: Engine) -> None:
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    some = prompts(6)
    results = engine.generate(some, SamplingParams(max_new_tokens=20, ignore_eos=True))
    for prompt, result in zip(some, results, strict=True):
        assert list(result.token_ids) == transformers_greedy(oracle, prompt, 20)


def test_a_penalty_sees_prompt_and_output_as_in_transformers(folder: Path, engine: Engine) -> None:
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    some = prompts(4, longest=20)
    penalised = SamplingParams(max_new_tokens=16, ignore_eos=True, repetition_penalty=1.8)
    plain = SamplingParams(max_new_tokens=16, ignore_eos=True)
    results = engine.generate(some * 2, [penalised] * 4 + [plain] * 4)
    for prompt, result in zip(some, results, strict=False):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "eos_token_id": None}
        wanted = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, repetition_penalty=1.8, **options
        )
        assert list(result.token_ids) == wanted[0, len(prompt) :].tolist()
    assert [r.token_ids for r in results[:4]] != [r.token_ids for r in results[4:]]


@pytest.mark.parametrize("changes", [{"max_batch_tokens": 6}, {"max_batch_size": 1}, {"block_size": 32}])
def test_no_setting_of_the_batch_changes_a_token(folder: Path, engine: Engine, changes: dict[str, int]) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=3, ignore_eos=True)
    wanted = engine.generate(prompts(8), params)
    with Engine(config(folder, **changes)) as other:
        got = other.generate(prompts(8), params)
    assert all(same(a, b) for a, b in zip(wanted, got, strict=True))


def test_stopped_by_the_checkpoints_own_eos(folder: Path, engine: Engine) -> None:
    eos_id = engine.info().eos_ids[-1]
    bias = SamplingParams(max_new_tokens=20, logit_bias={eos_id: 100.0})
    (result,) = engine.generate([[20, 30]], bias)
    assert (result.token_ids, result.text, result.finish_reason.value) == ((eos_id,), "", "stop")
    later = SamplingParams(max_new_tokens=20, logit_bias={eos_id: 100.0}, min_new_tokens=4)
    (result,) = engine.generate([[20, 30]], later)
    assert result.token_ids.index(eos_id) == 4  # four tokens, then it may end


def test_an_eos_id_that_the_model_cannot_say_is_left_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2**70, N_VOCAB, 7]}))
    with Engine(config(tmp_path / "copy")) as engine:
        assert engine.info().vocab_size == N_VOCAB
        assert {5, 7} <= set(engine.info().eos_ids) < set(range(N_VOCAB))
        (result,) = engine.generate([[20, 30]], SamplingParams(max_new_tokens=3, min_new_tokens=3))
        assert result.usage.completion_tokens == 3


def test_a_chat_prompt_and_a_text_prompt(engine: Engine) -> None:
    (result,) = engine.generate(["hello the world"], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert result.usage.completion_tokens == 5
    assert engine.info().has_chat_template


def test_logprobs_come_with_their_spelling(engine: Engine) -> None:
    (result,) = engine.generate([[20, 30]], SamplingParams(max_new_tokens=3, logprobs=2, ignore_eos=True))
    assert len(result.logprobs) == 3
    for position, token_id in zip(result.logprobs, result.token_ids, strict=True):
        assert position.chosen.token_id == token_id == position.top[0].token_id
        assert position.chosen.logprob == position.top[0].logprob >= position.top[1].logprob
        assert position.chosen.text


def test_the_log_tells_how_n_slots_came_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Engine(config(folder, n_slots=None, max_kv_bytes=4 << 20)) as engine:
        assert engine.info().n_slots > 0
        assert f"n_slots={engine.info().n_slots}" in caplog.text
    assert "MiB for K/V" in caplog.text


def test_nothing_of_prompt_or_answer_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case J5, with an error forced on the way."""
    caplog.set_level(logging.INFO)
    with Engine(config(folder)) as engine:
        (result,) = engine.generate(["hello xylophone"], SamplingParams(max_new_tokens=8, ignore_eos=True))
        monkeypatch.setattr(KVPool, "write", lambda *args: 1 / 0)
        with pytest.raises(Exception, match="internal error"):
            engine.generate(["hello xylophone"], SamplingParams(max_new_tokens=8))
    assert "ZeroDivisionError" in caplog.text
    assert "xylophone" not in caplog.text
    assert str(list(result.prompt_token_ids))[1:-1] not in caplog.text


def test_asking_for_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        assert pick_device("auto").type == "cuda"
        return
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        pick_device("cuda")


def test_memory_that_cannot_hold_the_configured_slots(folder: Path) -> None:
    with pytest.raises(InsufficientMemoryError):
        Engine(config(folder, n_slots=10**10)).start()


def test_the_worst_batch_has_the_worst_shape_over_one_block() -> None:
    batch = worst_batch(n_requests=4, n_tokens=32, context=100, block_size=8, device=torch.device("cpu"))
    assert batch.n_tokens == 32
    assert len(batch.sample_rows) == 4
    assert [span.context for span in batch.spans] == [100] * 4
    assert {block for span in batch.spans for block in span.blocks} == {0}
    assert [len(span.blocks) for span in batch.spans] == [13] * 4
    assert batch.positions.max() == 99


@pytest.mark.parametrize(("n_requests", "n_tokens", "context", "rows"), [
    (4, 32, 100, [29, 1, 1, 1]), (4, 32, 12, [12, 12, 7, 1]), (3, 30, 10, [10, 10, 10]), (5, 5, 8, [1] * 5),
    (1, 4, 4, [4]),
])  # fmt: skip
def test_the_worst_batch_has_all_the_rows_there_may_be(
    n_requests: int, n_tokens: int, context: int, rows: list[int]
) -> None:
    """D10: though no request is long enough to have them alone."""
    batch = worst_batch(n_requests, n_tokens, context, 8, torch.device("cpu"), vocab_size=7)
    assert [span.n_tokens for span in batch.spans] == rows
    assert len(set(batch.spans[0].request.token_ids)) == min(context, 7)


def test_weights_that_give_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    """Else the engine would be ready, stay healthy and fail every request."""
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="not finite"):
        Engine(config(tmp_path)).start()
