"""What callers of the library may hand in as a prompt."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from orca_core.errors import InvalidRequestError, RequestTooLargeError
from orca_core.prompts import LONG_TEXT, chat_ids, prompt_ids
from orca_core.tokenizer import Tokenizer
from orca_core.types import SamplingParams
from tests.core.engine_bench import Bench
from tests.core.tiny_tokenizers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("array", [
    np.array([20, 21, 22]), np.array([20, 21, 22], np.uint8), torch.tensor([20, 21, 22]),
    torch.tensor([20, 21, 22], dtype=torch.int32), [20, 21, 22], (20, 21, 22), range(20, 23),
])  # fmt: skip
def test_arrays_of_integers_are_prompts(bench: Bench, array: Any) -> None:
    request = bench.engine.make_request(array)
    assert request.token_ids == (20, 21, 22)
    assert all(type(token_id) is int for token_id in request.token_ids)


@pytest.mark.parametrize("array", [
    np.array([[20, 21]]), np.array(20), np.array([20.0]), np.array([True]), torch.tensor([[1]]), torch.tensor(1),
    torch.tensor([1.5]), torch.tensor([True]), np.array(["a"]), np.array([None]),
])  # fmt: skip
def test_other_arrays_are_refused_with_what_is_wrong(bench: Bench, array: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: an array must hold integers and have one dimension"):
        bench.engine.make_request(array)


def test_of_several_prompts_the_wrong_one_is_named(bench: Bench) -> None:
    for wrong in ("", [10**9], np.array([0.5])):
        with pytest.raises(InvalidRequestError) as refused:
            bench.engine.generate([[20], wrong])
        assert refused.value.field == "prompts[1]"
    with pytest.raises(RequestTooLargeError) as too_large:
        bench.engine.generate([[20], [20] * 5000])
    assert (too_large.value.field, too_large.value.__notes__) == ("max_new_tokens", ["of prompts[1]"])


def test_an_empty_array_is_an_empty_prompt(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="at least one token"):
        bench.engine.make_request(np.array([], np.int64))


def test_lists_of_an_arrays_scalars_say_what_they_are(bench: Bench) -> None:
    for scalar in (np.int64(20), torch.tensor(20)):
        with pytest.raises(InvalidRequestError, match=f", not {type(scalar).__name__}"):
            bench.engine.make_request([scalar])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="tolist"):
        bench.engine.make_request({20})


def test_text_is_encoded(tokenizer: Tokenizer) -> None:
    assert prompt_ids(tokenizer, "hello") == tokenizer.encode("hello")
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        prompt_ids(tokenizer, "")


def test_a_chat_in_either_form(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_chat([("user", "hello"), ("assistant", "he")])
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he"}]
    assert chat_ids(tokenizer, messages) == expected
    assert chat_ids(tokenizer, [("user", "hello"), messages[1]]) == expected


@pytest.mark.parametrize("messages", [
    "hello", {"role": "user", "content": "x"}, [], ["hello"], [("user",)], [("user", 1)], [{"role": "user"}], None,
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "x", "name": "y"}], [{}],
])  # fmt: skip
def test_what_is_no_chat(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        chat_ids(tokenizer, messages)


def test_roles_are_those_of_the_apis(tokenizer: Tokenizer) -> None:
    assert chat_ids(tokenizer, [("developer", "x")]) == tokenizer.encode_chat([("system", "x")])
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.role: must be one of system, developer, user"):
        chat_ids(tokenizer, [("user", "x"), ("usr", "y")])


async def test_a_long_text_is_tokenised_beside_the_event_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def encode(_self: Tokenizer, text: str) -> list[int]:
        threads.append(threading.current_thread())
        return [20] * min(len(text), 5)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for text in ("short", "x" * LONG_TEXT):
        chunks = [chunk async for chunk in bench.engine.stream(text, SamplingParams(max_new_tokens=2))]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 2
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
