"""Text as it grows, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_core.errors import InvariantError
from orca_core.params import SamplingParams
from orca_core.stream import StreamUpdate, TextStream, find_stop, longest_partial_stop
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason
from tests.core.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

STOP = FinishReason.STOP
NO_EOS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_tokenizer(tmp_path_factory.mktemp("sentencepiece"))


def chars(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a character of ASCII."""
    return [tokenizer.encode(char)[0] for char in text]


def run(stream: TextStream, ids: Sequence[int]) -> tuple[list[str], StreamUpdate | None]:
    """The deltas, and the update that ended the request (``None``: it ran to the end of ``ids``)."""
    deltas = []
    for token_id in ids:
        update = stream.push(token_id)
        deltas.append(update.text)
        if update.finish is not None:
            return deltas, update
    deltas.append(stream.finish().text)
    return deltas, None


def stop_in(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The oracle: reads the whole text from the left until one is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("include", [False, True])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_whole_decode_up_to_the_stop(
    family: str, include: bool, byte_level: Tokenizer, sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    """B4, B5, B7: whatever the tokens, also invalid bytes and special tokens."""
    tokenizer = byte_level if family == "byte_level" else sentencepiece
    common = tokenizer.encode("hello the cat é 日") + tokenizer.encode("ahhhe")
    some_id = st.one_of(st.sampled_from(common), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(some_id, max_size=20))
    text = tokenizer.decode(ids)
    pieces = st.integers(0, len(text)).flatmap(lambda i: st.integers(1, 6).map(lambda n: text[i : i + n]))
    stop = st.one_of(st.text("helo \ufffd", min_size=1, max_size=4), pieces.filter(bool))
    stops = tuple(data.draw(st.lists(stop, max_size=4)))
    expected, match = text, stop_in(text, stops)
    if match is not None:
        expected = text[: match[0] + (len(match[1]) if include else 0)]
    deltas, end = run(TextStream(tokenizer, SamplingParams(stop=stops, include_stop_text=include), NO_EOS), ids)
    assert "".join(deltas) == expected
    if end is not None:
        assert match is not None
        assert (end.finish, end.stop) == (STOP, match[1])
    # the same tokens in a new stream give the same state: what failover relies on
    again, _ = run(TextStream(tokenizer, SamplingParams(stop=stops, include_stop_text=include), NO_EOS), ids)
    assert again == deltas


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_no_more_is_held_back_than_may_begin_a_stop(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=tuple(stops)), NO_EOS)
    out = ""
    for n, token_id in enumerate(chars(byte_level, text), 1):
        update = stream.push(token_id)
        out += update.text
        if update.finish is not None:
            return
        held = text[len(out) : n]
        longest = max((k for s in stops for k in range(1, len(s)) if text[:n].endswith(s[:k])), default=0)
        assert out == text[: n - longest]
        assert len(held) == longest


def test_nothing_of_a_stop_string_is_sent_and_a_false_start_is(byte_level: Tokenizer) -> None:
    """B4: the held text comes out when the match fails, and at the end."""
    stream = TextStream(byte_level, SamplingParams(stop=("DEFG",)), NO_EOS)
    assert [stream.push(i).text for i in chars(byte_level, "ABDEXDEF")] == ["A", "B", "", "", "DEX", "", "", ""]
    assert stream.finish().text == "DEF"


def test_stop_string_across_tokens_ends_in_the_token_that_completes_it(byte_level: Tokenizer) -> None:
    """B5, B7: nothing after the match, though the token goes on."""
    ids = byte_level.encode("say hello the")
    stream = TextStream(byte_level, SamplingParams(stop=("y hell",)), NO_EOS)
    deltas, end = run(stream, ids)
    assert "".join(deltas) == "sa"
    assert end == StreamUpdate("", STOP, "y hell")
    assert byte_level.token_text(ids[len(deltas) - 1]) == "hello"
    assert stream.finish().text == ""


def test_included_stop_text_ends_with_it(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("hell",), include_stop_text=True), NO_EOS)
    deltas, _ = run(stream, byte_level.encode("hello"))
    assert "".join(deltas) == "hell"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabcd", ("abcd", "bc"), (2, "bc")),  # complete first, though it starts later
        ("xabcd", ("cd", "bcd"), (2, "bcd")),  # complete together: the longest
        ("xabcd", ("e",), None),
        ("aab", ("ab",), (1, "ab")),
    ],
)
def test_which_stop_string_wins(text: str, stops: tuple[str, ...], expected: tuple[int, str] | None) -> None:
    assert find_stop(text, stops) == expected == stop_in(text, stops)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_longest_partial_stop(text: str, stops: list[str]) -> None:
    expected = max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
    assert longest_partial_stop(text, stops) == expected


# ---- ids that end a request


def test_eos_ends_without_text_and_releases_what_was_held(byte_level: Tokenizer) -> None:
    """B16: any listed eos id; its text is not in the output, special or not."""
    tool = byte_level.encode("<tool use>")[0]
    for eos in (byte_level.eos_ids[0], tool):
        stream = TextStream(byte_level, SamplingParams(stop=("bcd",)), frozenset({*byte_level.eos_ids, tool}))
        deltas, end = run(stream, [*chars(byte_level, "abc"), eos, *chars(byte_level, "d")])
        assert deltas == ["a", "", "", "bc"]
        assert end == StreamUpdate("bc", STOP, None)


def test_stop_token_id_is_named(byte_level: Tokenizer) -> None:
    a, b = chars(byte_level, "ab")
    deltas, end = run(TextStream(byte_level, SamplingParams(stop_token_ids=(b,)), NO_EOS), [a, b, a])
    assert deltas == ["a", ""]
    assert end == StreamUpdate("", STOP, str(b))


def test_ignored_eos_is_a_token_like_any_other(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_ids[0]
    a, b = chars(byte_level, "ab")
    stream = TextStream(byte_level, SamplingParams(ignore_eos=True, stop_token_ids=(b,)), frozenset({eos}))
    deltas, end = run(stream, [a, eos, a, b])
    assert "".join(deltas) == "aa"
    assert end is not None
    assert end.stop == str(b)


def test_eos_flushes_an_unfinished_character(byte_level: Tokenizer) -> None:
    half = byte_level.encode("é")[0]
    deltas, end = run(TextStream(byte_level, SamplingParams(), frozenset({1})), [half, 1])
    assert deltas == ["", "\ufffd"]
    assert end is not None
    assert end.finish is STOP


def test_what_eos_or_the_limit_releases_may_hold_a_stop_string(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece._backend.token_to_id(f"<0x{value:02X}>") for value in "你好".encode()]
    deltas, end = run(TextStream(sentencepiece, SamplingParams(stop=("好",)), frozenset({1})), [*ids, 1])
    assert "".join(deltas) == "你"
    assert end == StreamUpdate("你", STOP, "好")
    deltas, end = run(TextStream(sentencepiece, SamplingParams(stop=("好",)), NO_EOS), ids)
    assert "".join(deltas) == "你"
    assert end is None


# ---- min_new_tokens


def test_stop_string_before_min_new_tokens_is_text(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("b",), min_new_tokens=4), NO_EOS)
    deltas, end = run(stream, chars(byte_level, "abcabc"))
    assert "".join(deltas) == "abca"
    assert len(deltas) == 5
    assert end is not None
    at_once = TextStream(byte_level, SamplingParams(stop=("b",), min_new_tokens=2), NO_EOS)
    assert run(at_once, chars(byte_level, "abcabc"))[0] == ["a", ""]


def test_stop_string_may_begin_before_min_new_tokens(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("bcd", "c"), min_new_tokens=4), NO_EOS)
    deltas, end = run(stream, chars(byte_level, "abcde"))
    assert "".join(deltas) == "a"
    assert end is not None
    assert end.stop == "bcd"


def test_eos_before_min_new_tokens_does_not_end(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_ids[0]
    stream = TextStream(byte_level, SamplingParams(min_new_tokens=2), frozenset({eos}))
    assert stream.push(eos).finish is None
    assert stream.push(chars(byte_level, "a")[0]) == StreamUpdate("a")
    assert stream.push(eos).finish is STOP


# ---- ends


def test_nothing_after_the_end(byte_level: Tokenizer) -> None:
    a = chars(byte_level, "a")[0]
    for end in (lambda stream: stream.push(1), lambda stream: stream.finish(), lambda stream: stream.push(a)):
        stream = TextStream(byte_level, SamplingParams(stop=("a",)), frozenset({1}))
        end(stream)
        assert stream.finish().text == ""
        with pytest.raises(InvariantError):
            stream.push(a)


def test_work_a_token_does_not_grow_with_the_text(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No decode of what is out already: 50 tokens or 5000, the whole is never looked at."""
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded the whole"))
    stream = TextStream(byte_level, SamplingParams(stop=("never",)), NO_EOS)
    for token_id in byte_level.encode("the hello ") * 500:
        stream.push(token_id)
        assert len(stream._held) < len("never")


def test_hostile_stop_strings(byte_level: Tokenizer) -> None:
    """Sixteen stops of 1 KB that nearly match all along: held text is bounded, and all of it comes out."""
    stops = tuple("a" * (1000 + i) + "b" for i in range(16))
    stream = TextStream(byte_level, SamplingParams(stop=stops), NO_EOS)
    a = chars(byte_level, "a")[0]
    out = "".join([*(stream.push(a).text for _ in range(3000)), stream.finish().text])
    assert out == "a" * 3000


def test_a_stop_string_that_only_the_end_settles_is_a_stop(tmp_path: Path) -> None:
    """With byte fallback a newline is a byte, and a byte may always be followed by more of its character."""
    tokenizer = sentencepiece_tokenizer(tmp_path)
    newline = tokenizer._backend.token_to_id("<0x0A>")
    stream = TextStream(tokenizer, SamplingParams(stop=("\n",)), frozenset())
    updates = [stream.push(newline), stream.finish()]
    assert "".join(update.text for update in updates) == ""
    assert [(update.finish, update.stop) for update in updates if update.finish] == [(FinishReason.STOP, "\n")]
