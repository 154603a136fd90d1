"""The prefix cache under a whole engine: the same tokens with it and without, whatever is shared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.types import GenerationResult, SamplingParams
from tests.core.tiny_models import tiny_qwen3
from tests.core.tiny_tokenizers import save_byte_level

N_VOCAB = 270


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(vocab_size=N_VOCAB, num_hidden_layers=2).save_pretrained(path)
    save_byte_level(path)
    return path


def make_engine(folder: Path, *, prefix_cache: bool, n_slots: int = 260, max_batch_tokens: int = 24) -> Engine:
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", max_batch_size=5, max_batch_tokens=max_batch_tokens,
        block_size=4, n_slots=n_slots, prefix_cache=prefix_cache,
    )  # fmt: skip
    return Engine(config)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with make_engine(folder, prefix_cache=False) as engine:
        yield engine


def workload(seed: int, n: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Beginnings that are shared in part, ends of their own, parameters that look back at the prompt among them."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, N_VOCAB) for _ in range(60)] for _ in range(3)]
    texts.append([*texts[0][:30], *texts[1][:30]])
    prompts, each = [], []
    for number in range(n):
        text = rng.choice(texts)
        prompts.append([*text[: rng.randint(1, 60)], *[rng.randrange(3, 9) for _ in range(rng.randrange(4))]])
        each.append(
            SamplingParams(
                max_new_tokens=rng.randint(1, 14), ignore_eos=True, seed=number, logprobs=1,
                temperature=rng.choice([0.0, 0.0, 0.9]), repetition_penalty=rng.choice([1.0, 1.4]),
                frequency_penalty=rng.choice([0.0, 0.6]),
            )
        )  # fmt: skip
    return prompts, each


def assert_same(one: GenerationResult, other: GenerationResult) -> None:
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)


@pytest.mark.parametrize(("n_slots", "max_batch_tokens"), [(260, 24), (80, 5), (2000, 200)])
def test_tokens_are_the_same_with_the_cache_and_without(
    folder: Path, plain: Engine, n_slots: int, max_batch_tokens: int
) -> None:
    """80 slots hold about one request: what is cached is evicted all the time."""
    prompts, each = workload(n_slots, 24)
    wanted = plain.generate(prompts, each)
    with make_engine(folder, prefix_cache=True, n_slots=n_slots, max_batch_tokens=max_batch_tokens) as engine:
        for _ in range(2):
            got = engine.generate(prompts, each)
            for one, other in zip(wanted, got, strict=True):
                assert_same(one, other)
    load = engine.load()
    n_cached = sum(result.usage.cached_prompt_tokens for result in got)
    assert 0 < n_cached < load.cached_prompt_tokens < load.prompt_tokens
    assert (load.reserved_slots, load.used_slots) == (0, 0)
    assert plain.load().cached_prompt_tokens == sum(result.usage.cached_prompt_tokens for result in wanted) == 0


def test_turns_of_a_chat_find_prompt_and_answer_of_the_last(folder: Path, plain: Engine) -> None:
    params = SamplingParams(max_new_tokens=11, ignore_eos=True)
    with make_engine(folder, prefix_cache=True) as engine:
        history, n_known = list(range(20, 31)), 0
        for turn in range(4):
            (result,) = engine.generate([history], params)
            (wanted,) = plain.generate([history], params)
            assert result.token_ids == wanted.token_ids
            # all of the last turn but its newest token, in whole blocks
            assert result.usage.cached_prompt_tokens == max(0, n_known - 1) // 4 * 4
            history += [*result.token_ids]
            n_known = len(history)
            history += [40 + turn, 41]
