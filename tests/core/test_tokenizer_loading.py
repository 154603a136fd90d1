"""Tokenizers from the files of models, and the embedded one."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from orca_core.errors import InvalidRequestError, ModelLoadError
from orca_core.source import ModelSource, resolve_source
from orca_core.tokenizer import Tokenizer
from orca_core.tokenizer.panics import panics_as_errors
from tests.core.tiny_tokenizers import save_byte_level


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(ModelSource("broken", "safetensors", tmp_path))
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 5))
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(ModelSource("broken", "gguf", tmp_path, file))


PANICS = [
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
]
"""Of tokenizers 0.22: the library does not look at them before a text comes, and then it panics."""


def change_tokenizer(folder: Path, **changes: object) -> ModelSource:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return ModelSource("odd", "safetensors", folder)


@pytest.mark.parametrize(("field", "value"), PANICS)
def test_a_tokenizer_that_panics_is_not_loaded(tmp_path: Path, field: str, value: object) -> None:
    source = change_tokenizer(save_byte_level(tmp_path), **{field: value})
    with pytest.raises(ModelLoadError, match="TokenizerPanicError"):
        Tokenizer.load(source)


def test_a_panic_later_is_an_error_of_the_request(tmp_path: Path) -> None:
    """None is known of a text and not of a tokenizer, so one is made: the same rule, put there after loading."""
    source = ModelSource("fine", "safetensors", save_byte_level(tmp_path))
    tokenizer = Tokenizer.load(source)
    tokenizer._backend.pre_tokenizer = Backend.from_file(
        str(change_tokenizer(tmp_path, pre_tokenizer=PANICS[1][1]).folder / "tokenizer.json")
    ).pre_tokenizer
    for text in ("hello", "hello" * 2000):
        with pytest.raises(InvalidRequestError, match="prompt: the model's tokenizer cannot read"):
            tokenizer.encode(text)
        with pytest.raises(InvalidRequestError, match="messages: the model's tokenizer cannot read"):
            tokenizer.encode_chat([("user", text)])


def test_a_text_without_a_word_for_it_is_refused(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path)
    model = {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "<|end|>": 2, "hello": 3}, "unk_token": "<unk>"}
    tokenizer = Tokenizer.load(change_tokenizer(folder, model=model, pre_tokenizer={"type": "Whitespace"}))
    assert tokenizer.encode("hello hello") == [3, 3]
    with pytest.raises(InvalidRequestError, match="cannot read this text"):
        tokenizer.encode("goodbye")


def test_only_panics_are_turned_into_errors() -> None:
    for kind in (KeyboardInterrupt, ValueError):
        with pytest.raises(kind), panics_as_errors():
            raise kind


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(ModelLoadError):
        Tokenizer.load(ModelSource("evil", "safetensors", folder))
    assert not (tmp_path / "PWNED").exists()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(resolve_source("smollm2-135m-instruct"))


@pytest.mark.model
def test_embedded_model_reads_digits_one_by_one(smollm2: Tokenizer) -> None:
    """As the tokenizer.json of SmolLM2 does: digits are split off before anything else is looked at."""

    def tokens(text: str) -> list[str]:
        return [smollm2.token_text(i) for i in smollm2.encode(text)]

    assert tokens("12345") == ["1", "2", "3", "4", "5"]
    assert tokens("x  12") == ["x", "  ", "1", "2"]
    assert tokens("Hello world, I'm") == ["Hello", " world", ",", " I", "'m"]
    assert smollm2.vocab_size == 49152


@pytest.mark.model
def test_embedded_models_chat(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([("user", "Why?")])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode_chat([("user", "Why?")])
    assert ids[0] == 1
    assert smollm2.eos_ids == (2,)
    assert "".join(map(smollm2.token_text, ids)) == text
