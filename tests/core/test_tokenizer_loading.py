"""Tokenizers from the files of models, and the embedded one."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest

from orca_core.errors import ModelLoadError
from orca_core.source import ModelSource, resolve_source
from orca_core.tokenizer import Tokenizer
from tests.core.tiny_tokenizers import save_byte_level


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(ModelSource("broken", "safetensors", tmp_path))
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 5))
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(ModelSource("broken", "gguf", tmp_path, file))


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
