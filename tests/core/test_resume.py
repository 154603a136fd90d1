"""A generation that began elsewhere and goes on here: cut anywhere, it is the run that was never cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.errors import InvalidRequestError
from orca_core.request import Request
from orca_core.stream import TextStream
from orca_core.tokenizer import Tokenizer
from orca_core.types import GenerationChunk, GenerationRequest, SamplingParams
from orca_core.validation import make_request
from tests.core.builders import INFO
from tests.core.loop_bench import LoopBench
from tests.core.tiny_models import tiny_llama
from tests.core.tiny_tokenizers import byte_ids, byte_level_tokenizer, save_byte_level, save_sentencepiece
from tests.core.tiny_tokenizers import sentencepiece_tokenizer as sentencepiece

N_VOCAB = 290
PROMPT = tuple(range(20, 33))


def join(chunks: Sequence[GenerationChunk]) -> tuple[tuple[int, ...], str, tuple[Any, ...]]:
    """Ids, text, and what the last chunk says of the end."""
    last = chunks[-1]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert last.usage is not None
    end = (last.finish_reason, last.stop, last.usage.prompt_tokens, last.usage.completion_tokens)
    return tuple(i for chunk in chunks for i in chunk.token_ids), "".join(chunk.text for chunk in chunks), end


# ---- over a script of tokens: text, byte for byte


def scripted(
    tokenizer: Tokenizer, script: Sequence[int], sampling: SamplingParams, n_cut: int
) -> list[GenerationChunk]:
    """One chunk a token, of a run in which the first ``n_cut`` tokens of the script were said elsewhere."""
    bench = LoopBench(tokenizer, turn_s=0.0)
    bench.executor._choose = lambda request: script[request.n_output_tokens]
    emitted = tuple(script[:n_cut])
    name = bench.submit(GenerationRequest("x", (5, 6, 7), len(script), 0, sampling, None, emitted))
    chunks = []
    while not bench.loop.idle:
        bench.turn()
        chunks.append(next(bench.channels[name]))
    bench.loop.settle()
    assert bench.executor.wrong == []
    return chunks


SAMPLINGS = {
    "plain": SamplingParams(),
    "stop string, partly out before the cut": SamplingParams(stop=("日本", "zz")),
    "stop string that is kept": SamplingParams(stop=("é the",), include_stop_text=True),
    "stop string counts late": SamplingParams(stop=("h", "t"), min_new_tokens=9),
    "never complete": SamplingParams(stop=("本!" * 20,)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece], ids=["byte_level", "sentencepiece"])
def test_text_goes_on_byte_for_byte_after_what_was_out(tmp_path: Path, make: Any, sampling: SamplingParams) -> None:
    """Every character of more than a byte is split over tokens; also bytes that are no UTF-8."""
    tokenizer = make(tmp_path)
    script = byte_ids(tokenizer, "hé the 日本 ü".encode() + b"\xff\xe6\x97" + "本!".encode() + b"\xf0\x9f")
    uncut = scripted(tokenizer, script, sampling, 0)
    for n_cut in range(1, len(uncut)):
        resumed = scripted(tokenizer, script, sampling, n_cut)
        assert resumed == uncut[n_cut:]


def test_an_eos_or_a_stop_string_among_the_emitted_is_a_mistake_of_whoever_resumes(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    script = byte_ids(tokenizer, b"abcdef")
    bench = LoopBench(tokenizer)
    for sampling in (SamplingParams(stop=("bc",)), SamplingParams(stop_token_ids=(script[1],))):
        spec = GenerationRequest("x", (5, 6), 10, 0, sampling, None, tuple(script[:4]))
        bench.submit(spec)
        bench.loop.settle()
        with pytest.raises(InvalidRequestError, match="emitted_ids"):
            next(bench.channels["x"])
    assert bench.loop.idle
    assert bench.ended["x"] == 2


# ---- over a model: tokens, log-probabilities, ends


@pytest.fixture(scope="module", params=[save_byte_level, save_sentencepiece], ids=["byte_level", "sentencepiece"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=N_VOCAB, num_hidden_layers=2).save_pretrained(folder)
    request.param(folder)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_batch_size=4,
        max_batch_tokens=8,
        block_size=4,
        n_slots=300,
    )
    with Engine(config) as made:
        yield made


RUNS = {
    "greedy": SamplingParams(logprobs=2, ignore_eos=True),
    "greedy with penalties": SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, min_new_tokens=12
    ),
    "seeded with penalties": SamplingParams(
        temperature=0.9, top_p=0.95, top_k=60, seed=7, repetition_penalty=1.2, frequency_penalty=0.5, min_new_tokens=6,
        logprobs=0,
    ),
}  # fmt: skip


def run(engine: Engine, sampling: SamplingParams, emitted: tuple[int, ...] = ()) -> list[GenerationChunk]:
    request = make_request(f"cut-{len(emitted)}", PROMPT, sampling, engine.info(), emitted_ids=emitted)
    return list(engine.submit(request))


def told(engine: Engine, sampling: SamplingParams, emitted: tuple[int, ...]) -> str:
    """The text that was out when these were the tokens."""
    stream = TextStream(engine._model.tokenizer, sampling, frozenset(engine.info().eos_ids))  # type: ignore[union-attr]
    return "".join(stream.push(token_id).text for token_id in emitted)


@pytest.mark.parametrize("sampling", RUNS.values(), ids=RUNS.keys())
def test_a_run_cut_anywhere_goes_on_as_if_it_was_not(engine: Engine, sampling: SamplingParams) -> None:
    sampling = replace(sampling, max_new_tokens=18)
    uncut = run(engine, sampling)
    ids, text, end = join(uncut)
    logprobs = [entry for chunk in uncut for entry in chunk.logprobs]
    stopped = replace(sampling, stop=(told(engine, sampling, ids[:-1])[-2:],))
    for params in (sampling, stopped):
        ids, text, end = join(run(engine, params))
        assert (end[1] in params.stop) is (params is stopped)
        for n_cut in range(1, len(ids)):
            resumed = run(engine, params, ids[:n_cut])
            new_ids, new_text, new_end = join(resumed)
            assert (new_ids, new_end) == (ids[n_cut:], end)
            assert told(engine, params, ids[:n_cut]) + new_text == text
            if params is sampling:
                got = [entry for chunk in resumed for entry in chunk.logprobs]
                for one, other in zip(got, logprobs[n_cut:], strict=bool(logprobs)):
                    assert one.chosen.token_id == other.chosen.token_id
                    assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
                    assert [t.token_id for t in one.top] == [t.token_id for t in other.top]


def test_the_demand_of_a_resumed_request_is_what_it_was() -> None:
    whole = make_request("a", PROMPT, SamplingParams(max_new_tokens=20), INFO)
    resumed = make_request("a", PROMPT, SamplingParams(max_new_tokens=20), INFO, emitted_ids=(7, 8, 9))
    assert resumed.total_tokens == whole.total_tokens == 33
    state = Request(resumed, 0.0)
    assert (state.n_prompt_tokens, state.n_output_tokens, state.output_ids) == (13, 3, [7, 8, 9])
    assert state.in_initiation
    assert "7, 8" not in repr(resumed)


@pytest.mark.parametrize(
    ("emitted", "words"), [((7,) * 4, "fewer than max_new_tokens"), ((INFO.vocab_size,), "token ids"), ((-1,), "token")]
)
def test_emitted_ids_are_checked_like_a_prompt(emitted: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        make_request("a", PROMPT, SamplingParams(max_new_tokens=4), INFO, emitted_ids=emitted)
    assert caught.value.field == "emitted_ids"


def test_what_was_emitted_is_computed_with_the_prompt_not_token_by_token(tokenizer: Tokenizer) -> None:
    bench = LoopBench(tokenizer, max_batch_tokens=15)
    name = bench.submit(GenerationRequest("a", PROMPT, 9, 0, emitted_ids=tuple(range(40, 48))))
    assert [bench.turn(), bench.turn()] == [[(name, 15)], [(name, 6)]]
    assert bench.loop.idle


def test_a_resumed_prompt_counts_where_it_began(tokenizer: Tokenizer) -> None:
    bench = LoopBench(tokenizer)
    bench.submit(GenerationRequest("a", PROMPT, 6, 0))
    bench.run()
    first = bench.outcome("a")[0]
    bench.submit(GenerationRequest("b", PROMPT, 6, 0, emitted_ids=first.token_ids[:4]))
    bench.run()
    said, error = bench.outcome("b")
    assert error is None
    assert said.token_ids == first.token_ids[4:]
    assert said.usage is not None
    assert (said.usage.completion_tokens, said.usage.cached_prompt_tokens) == (6, 13)
    load = bench.loop.load()
    assert (load.prompt_tokens, load.generated_tokens) == (13, 6 + 2)
