"""No request sees another's words, and none leaves anything behind, however it ends."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.types import SamplingParams
from tests.core.tiny_models import tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

N_VOCAB = 270
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(vocab_size=N_VOCAB).save_pretrained(folder)
    save_byte_level(folder)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", max_batch_size=8, max_batch_tokens=24, block_size=4,
        n_slots=500, threads=1,
    )  # fmt: skip
    with Engine(config) as made:
        yield made


def test_64_secrets_stay_where_they_belong(engine: Engine) -> None:
    """Each prompt is a run of one token nobody else has; lengths differ, so that members change at every iteration."""
    rng = random.Random(1)
    prompts = [[3 + i] * rng.randint(1, 40) + [200, 201] for i in range(64)]
    each = [SamplingParams(max_new_tokens=rng.randint(1, 25), ignore_eos=True) for _ in prompts]
    together = engine.generate(prompts, each)
    alone = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


@pytest.mark.model
def test_64_secret_words_of_a_real_model() -> None:
    """It repeats the word of its own prompt, and never one of another's."""
    words = [f"{name}{number}" for name in ("amber", "cobalt", "maple", "onyx") for number in range(10, 26)]
    prompts = [f"The password is {word}. Again, the password is {word}. Once more, the password is" for word in words]
    config = EngineConfig(dtype="float32", device="cpu", n_slots=2000, max_batch_tokens=64)
    with Engine(config) as engine:
        results = engine.generate(prompts, [SamplingParams(max_new_tokens=6 + i % 4) for i in range(len(words))])
    repeated = 0
    for word, result in zip(words, results, strict=True):
        foreign = [other for other in words if other != word and other in result.text]
        assert foreign == []
        repeated += word in result.text
    assert repeated >= 48, "the model hardly ever says its word: the test would not notice a foreign one"


def test_a_thousand_streams_that_are_left(engine: Engine) -> None:
    """Left before the first token, in initiation, between tokens, at the end; then all is as if they never were."""
    rng = random.Random(2)
    process = psutil.Process()

    def cycle() -> None:
        prompt = [rng.randrange(3, N_VOCAB) for _ in range(rng.randint(1, 60))]
        request = engine.make_request(prompt, SamplingParams(max_new_tokens=rng.randint(1, 12), ignore_eos=True))
        channel = engine.submit(request)
        n_chunks = rng.randint(0, 6)
        for _, _ in zip(range(n_chunks), channel, strict=False):
            pass
        channel.close()

    for _ in range(200):
        cycle()
    gc.collect()
    threads, memory = threading.active_count(), process.memory_info().rss
    for _ in range(800):
        cycle()
    last = engine.generate([[5] * 30], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
    before = engine.load().iterations
    again = engine.generate([[5] * 30], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
    load = engine.load()
    assert again.token_ids == last.token_ids
    # of the prompt 28 tokens were cached; an iteration a token, then: nobody else's work was done beside it
    assert again.usage.cached_prompt_tokens == 28
    assert load.iterations - before == 20
    assert (load.reserved_slots, load.used_slots, load.queued_slots, load.waiting, load.running) == (0, 0, 0, 0, 0)
    gc.collect()
    assert threading.active_count() == threads
    assert process.memory_info().rss - memory < 16 * MIB
