from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from deployment.bench.perplexity import TEXT, measure_perplexity, windows
from deployment.cli.main import app
from orca_core.attention.reference import ReferenceAttention
from orca_core.errors import ConfigError
from tests.core.tiny_models import load, tiny_llama, transformers_logits
from tests.core.tiny_tokenizers import save_byte_level

VOCAB = 270
IDS = [(11 * i * i + 5 * i) % VOCAB for i in range(70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(vocab_size=VOCAB).save_pretrained(path)
    save_byte_level(path)
    return path


def test_a_text_is_cut_and_a_lone_token_has_nothing_to_foresee() -> None:
    assert windows(range(10), 4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert windows(range(9), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert windows([1], 4) == []


@pytest.mark.parametrize("length", [70, 33, 3])
def test_it_is_what_transformers_says(folder: Path, length: int) -> None:
    """With windows of unequal length side by side, and more of them than one batch holds."""
    found = measure_perplexity(load(folder), ReferenceAttention(), windows(IDS, length), "none")
    model = tiny_llama(vocab_size=VOCAB)
    loss, n = 0.0, 0
    for piece in windows(IDS, length):
        logits = transformers_logits(model, list(piece)[:-1])
        loss += float(F.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum"))
        n += len(piece) - 1
    assert found.n_tokens == n
    assert found.perplexity == pytest.approx(math.exp(loss / n), rel=1e-4)


def test_nothing_to_measure_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="fewer than two"):
        measure_perplexity(load(folder), ReferenceAttention(), [], "none")


def test_the_command_compares_quantisations(folder: Path, tmp_path: Path) -> None:
    text, record = tmp_path / "text.txt", tmp_path / "record.json"
    text.write_text(TEXT.read_text()[:150])
    options = ("--model", str(folder), "--text", str(text), "--json", str(record), "--window", "64")
    result = CliRunner().invoke(app, ["bench", "perplexity", "--quantization", "none, int4", *options])
    assert result.exit_code == 0, result.output
    none, int4 = json.loads(record.read_text())["found"]
    assert (none["quantization"], int4["quantization"], none["n_tokens"]) == ("none", "int4", int4["n_tokens"])
    assert none["perplexity"] != int4["perplexity"]
    assert none["weight_bytes"] == load(folder).weight_bytes
    assert "perplexity" in result.output


def test_unknown_names_and_empty_texts_are_refused(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "perplexity", "--quantization", "int8,int3"])
    assert isinstance(result.exception, ConfigError)
    assert "none, int8, int4" in str(result.exception)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    result = CliRunner().invoke(app, ["bench", "perplexity", "--model", str(folder), "--text", str(empty)])
    assert isinstance(result.exception, ConfigError)
