"""Tokenizers of the families there is a decoder for, as transformers builds them, from folders and from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from orca_core.source import ModelSource
from orca_core.tokenizer import Tokenizer
from tests.core.tiny_tokenizers import (
    FAMILIES,
    SPM_BYTES,
    SPM_WORDS,
    byte_ids,
    decode_by_token,
    id_of,
    save_byte_level,
    save_gemma,
    save_llama2,
    save_t5,
)

NAMES = ("byte_level", "llama2", "gemma", "t5")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: FAMILIES[name](tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.mark.parametrize("save", [save_byte_level, save_llama2, save_gemma, save_t5])
def test_encodes_as_transformers_does(save: Any, tmp_path: Path) -> None:
    folder = save(tmp_path)
    ours, theirs = Tokenizer.load(ModelSource("tiny", "safetensors", folder)), AutoTokenizer.from_pretrained(folder)
    for text in ("", "the cat é", " the", "  a", "a  the ", "日本 the\n\ncat", "</s>the<eos> a", "\ta\u00a0b"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decode_by_token(ours, ids) == ours.decode(ids)


@pytest.mark.parametrize(("name", "pieces", "deltas"), [
    # the space before the first word is the tokenizer's, in a family that puts one there
    ("llama2", ("▁the", "▁cat"), ["the", " cat"]),
    ("gemma", ("▁the", "▁cat"), [" the", " cat"]),
    ("t5", ("▁the", "▁cat"), ["the", " cat"]),
    # only one of them, and only if the text begins with it
    ("llama2", ("▁▁▁", "the"), ["  ", "the"]),
    ("llama2", ("▁", "▁the"), ["", " the"]),
    ("llama2", ("the", "▁"), ["the", " "]),
    ("t5", ("▁▁▁", "the"), ["", "the"]),
    # a special token is not there: what follows it is still the first word
    ("llama2", ("</s>", "▁the"), ["", "the"]),
    ("t5", ("</s>", "▁the"), ["", "the"]),
    # a text may begin with the bytes of a space
    ("llama2", ("<0x20>", "<0x20>", "the"), ["", "", " the"]),
    ("gemma", ("<0x20>", "the"), ["", " the"]),
    # mark and bytes spell the same space, side by side
    ("llama2", ("the", "<0x20>", "▁the"), ["the", "", "  the"]),
    ("gemma", ("\n", "▁the", "\n"), ["\n", " the", "\n"]),
])  # fmt: skip
def test_spaces(tokenizers: dict[str, Tokenizer], name: str, pieces: tuple[str, ...], deltas: list[str]) -> None:
    tokenizer = tokenizers[name]
    ids = [id_of(tokenizer, piece) for piece in pieces]
    decoder = tokenizer.decoder()
    assert [decoder.push(token_id) for token_id in ids] == deltas
    assert decoder.finish() == ""
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama2", "gemma"])
@pytest.mark.parametrize(("data", "after", "text"), [
    (b"\xe6", None, "\ufffd"),
    (b"\xe6\x97", None, "\ufffd" * 2),
    (b"\xe6\x97", "日", "\ufffd" * 2 + "日"),
    ("日".encode() + b"\xe6", "s", "\ufffd" * 4 + "s"),  # the library reads a run of bytes as a whole
    (b"\xf0\x9f\x98" * 3, "s", "\ufffd" * 9 + "s"),
    ("日😀".encode(), None, "日😀"),
    ("日😀".encode(), "s", "日😀s"),
    (b"\xff" * 40, None, "\ufffd" * 40),
])  # fmt: skip
def test_bytes_that_never_become_a_character(
    tokenizers: dict[str, Tokenizer], name: str, data: bytes, after: str | None, text: str
) -> None:
    tokenizer = tokenizers[name]
    ids = [*byte_ids(tokenizer, data), *([] if after is None else [id_of(tokenizer, after)])]
    assert tokenizer.decode(ids) == text
    assert decode_by_token(tokenizer, ids) == text


@pytest.mark.parametrize("name", ["llama2", "gemma"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_text_comes_back(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    """Whatever is not in the vocabulary is spelled in bytes, so nothing is lost but marks and Llama's one space."""
    tokenizer = tokenizers[name]
    if "▁" in text or any(mark in text for mark in ("<s>", "</s>", "<unk>", "<pad>", "<eos>", "<bos>", "<mask>")):
        return
    back = decode_by_token(tokenizer, tokenizer.encode(text))
    assert back == (text.removeprefix(" ") if name == "llama2" else text)


# ---- GGUF


def write_sentencepiece(path: Path, architecture: str, names: tuple[str, ...], **metadata: Any) -> ModelSource:
    """A file with nothing but a tokenizer: scores instead of merges, as llama.cpp's converter writes it."""
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*names, "<|im_end|>", "<think>", *SPM_BYTES, *SPM_WORDS])
    writer.add_token_scores([0.0] * (len(names) + 258) + [-float(i) for i in range(len(SPM_WORDS))])
    special = [kinds.CONTROL] * (len(names) + 1) + [kinds.USER_DEFINED]
    writer.add_token_types([*special, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(SPM_WORDS)])
    for key, name in (("bos", names[-2]), ("eos", names[-1]), ("unk", "<unk>")):
        getattr(writer, f"add_{key}_token_id")(names.index(name))
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("tiny", "gguf", path.parent, path)


LLAMA_NAMES = ("<unk>", "<s>", "</s>")
GEMMA_NAMES = ("<pad>", "<mask>", "<unk>", "<bos>", "<eos>")


@pytest.mark.parametrize(("architecture", "first"), [
    ("llama", "the"), ("phi3", "the"), ("olmo2", "the"), ("gemma2", " the"), ("gemma3", " the"),
])  # fmt: skip
def test_sentencepiece_in_a_gguf_file(architecture: str, first: str, tmp_path: Path) -> None:
    is_gemma = architecture.startswith("gemma")
    names = GEMMA_NAMES if is_gemma else LLAMA_NAMES
    metadata = {"add_space_prefix": False} if is_gemma else {}
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "a.gguf", architecture, names, **metadata))
    assert tokenizer.eos_ids == (len(names) - 1,)
    assert tokenizer.vocab_size == len(names) + 2 + 256 + len(SPM_WORDS)
    ids = tokenizer.encode("the 日本 the")
    assert tokenizer.token_text(ids[0]) == names[-2]  # the beginning of a sentence
    assert decode_by_token(tokenizer, ids) == tokenizer.decode(ids) == "the 日本 the"
    the, end, think = (id_of(tokenizer, name) for name in ("▁the", "<|im_end|>", "<think>"))
    assert decode_by_token(tokenizer, [the, the, end, think]) == f"{first} the<think>"
    assert tokenizer.encode("the<|im_end|>")[-1] == end
