"""From token ids to text, token by token: equal to one decode of all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from orca_core.detokenizer import WindowDecoder
from orca_core.detokenizer.pieces import Family, PieceTable, read_rules
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from tests.core.tiny_tokenizers import FAMILIES, byte_ids, decode_by_token, id_of


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture(scope="module")
def sentencepiece(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["sentencepiece"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_text_by_token_equals_one_decode(tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[family]
    # two ids beyond the vocabulary: a model's head may be padded
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    oracle = tokenizer._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids) == oracle
    assert decode_by_token(tokenizer, ids) == oracle


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40), cut=st.text(max_size=12))
def test_any_bytes_and_any_text_byte_by_byte(
    tokenizers: dict[str, Tokenizer], family: str, data: bytes, cut: str
) -> None:
    tokenizer = tokenizers[family]
    for content in (data, cut.encode(), cut.encode()[:-1]):
        ids = byte_ids(tokenizer, content)
        assert decode_by_token(tokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    if not any(name in text for name in ("<s>", "</s>", "<|end|>")):
        assert decode_by_token(byte_level, ids) == text
        assert b"".join(map(byte_level.token_bytes, ids)).decode() == text


def test_every_kind_of_invalid_utf8_is_read_as_the_library_reads_it(byte_level: Tokenizer) -> None:
    """Both sides of every boundary of Unicode's table 3-7, in all sequences of up to three bytes and on to a fourth."""
    edges = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
    ids = dict(zip(edges, byte_ids(byte_level, edges), strict=True))
    for n in (1, 2, 3):
        for data in itertools.product(edges, repeat=n):
            tail = [ids[0x80], ids[0x41]] if n == 3 and data[0] >= 0xF0 else []
            sequence = [*(ids[value] for value in data), *tail]
            assert decode_by_token(byte_level, sequence) == byte_level.decode(sequence), bytes(data)


def test_a_character_comes_out_with_its_last_byte(byte_level: Tokenizer) -> None:
    """B1, B2: a Hangul syllable of three tokens, an emoji of four."""
    decoder = byte_level.decoder()
    assert [decoder.push(i) for i in byte_ids(byte_level, "한😀".encode())] == ["", "", "한", "", "", "", "😀"]


def test_bytes_that_can_become_nothing_do_not_wait(byte_level: Tokenizer) -> None:
    decoder = byte_level.decoder()
    assert [decoder.push(i) for i in byte_ids(byte_level, b"\x80\xe4a\xff")] == ["\ufffd", "", "\ufffda", "\ufffd"]


def test_unfinished_sequence_is_read_at_the_end(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer, text in ((byte_level, "\ufffd"), (sentencepiece, "\ufffd\ufffd")):
        decoder = tokenizer.decoder()
        assert "".join(decoder.push(i) for i in byte_ids(tokenizer, b"\xe4\xbd")) == ""
        assert decoder.finish() == text


def test_byte_fallback_run_ends_with_the_next_ordinary_token(sentencepiece: Tokenizer) -> None:
    decoder = sentencepiece.decoder()
    ids = [*byte_ids(sentencepiece, "你".encode()), id_of(sentencepiece, "</s>"), id_of(sentencepiece, "s")]
    assert [decoder.push(i) for i in ids] == ["", "", "", "", "你s"]


def test_only_the_first_space_of_the_whole_text_is_stripped(sentencepiece: Tokenizer) -> None:
    the, space = id_of(sentencepiece, "▁the"), id_of(sentencepiece, "▁")
    assert decode_by_token(sentencepiece, [the, the]) == "the the"
    assert decode_by_token(sentencepiece, [space, the]) == " the"


def test_window_decoder_does_not_wait_for_ever() -> None:
    """A sequence that never becomes valid is let go after as many tokens as a character may need."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    decoder = WindowDecoder(decode, lambda _: True)
    deltas = [decoder.push(0x80) for _ in range(100)]
    waits = [len(list(group)) for empty, group in itertools.groupby(deltas, lambda delta: delta == "") if empty]
    assert max(waits) < 8
    assert "".join([*deltas, decoder.finish()]) == "\ufffd" * 100


def test_window_decoder_waits_for_a_character() -> None:
    decoder = WindowDecoder(lambda ids: bytes(ids).decode("utf-8", "replace"), lambda _: True)
    assert [decoder.push(value) for value in "한😀a".encode()] == ["", "", "한", "", "", "", "😀", "a"]
    assert decoder.finish() == ""


@pytest.mark.parametrize(
    ("decoder", "family"),
    [
        (decoders.ByteLevel(), Family.BYTE_LEVEL),
        (decoders.Metaspace(), Family.METASPACE),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            Family.BYTE_FALLBACK,
        ),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]), None),
        (decoders.CTC(), None),
    ],
)
def test_only_decoders_with_an_exact_reading_are_read(decoder: decoders.Decoder, family: Family | None) -> None:
    rules = read_rules(json.loads(decoder.__getstate__()))
    assert (rules and rules.family) is family


def test_a_piece_is_worked_out_once() -> None:
    rules = read_rules({"type": "ByteLevel"})
    assert rules is not None
    asked: list[int] = []

    def token(token_id: int) -> str | None:
        asked.append(token_id)
        return {5: "Ġa"}.get(token_id)

    pieces = PieceTable(rules, token, frozenset({7}))
    assert [pieces(token_id) for token_id in (5, 6, 7, 5, 6, 7)] == [b" a", None, None] * 2
    assert asked == [5, 6]


def test_one_token(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    end = id_of(byte_level, "<|end|>")
    assert (byte_level.token_text(end), byte_level.token_bytes(end)) == ("<|end|>", b"")
    half = byte_ids(byte_level, b"\xe4")[0]
    assert (byte_level.token_text(half), byte_level.token_bytes(half)) == ("\ufffd", b"\xe4")
    assert byte_level.token_text(id_of(byte_level, "Ġw")) == " w"
    assert byte_level.token_text(id_of(byte_level, "<tool use>")) == "<tool use>"
    assert sentencepiece.token_bytes(id_of(sentencepiece, "▁é")) == " é".encode()
    assert sentencepiece.token_bytes(id_of(sentencepiece, "<0xE4>")) == b"\xe4"
    assert sentencepiece.token_bytes(10**6) == b""


# ---- the embedded model


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(resolve_source("smollm2-135m-instruct"))


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), text=st.text(max_size=40))
def test_embedded_model_by_token(smollm2: Tokenizer, ids: list[int], text: str) -> None:
    assert decode_by_token(smollm2, ids) == smollm2.decode(ids)
    read = smollm2.encode(text)  # four bytes that no text of its training had are not in its vocabulary
    assert decode_by_token(smollm2, read) == smollm2.decode(read)


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "한국어 텍스트입니다. 각힣",
        "日本語のテキスト、漢字",
        "😀👩\u200d👩\u200d👧\u200d👦🇰🇷🧑\u200d🚀",
        "مرحبا بالعالم שלום",
        "नमस्ते दुनिया ไทย",
        "Ελληνικά é e\u0301 ß ﬁ\u00a0\u200b",
        "\t\n  x\r\n  y ",
    ],
)
def test_embedded_model_round_trip(smollm2: Tokenizer, text: str) -> None:
    """B1, B2: text of many scripts, where most characters are cut into several tokens."""
    decoder = smollm2.decoder()
    deltas = [*map(decoder.push, smollm2.encode(text)), decoder.finish()]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
