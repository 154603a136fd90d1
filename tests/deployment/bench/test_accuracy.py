from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deployment.bench import accuracy
from deployment.bench.accuracy import TEXTS, Accuracy, Found, load_ours, measure_accuracy, measure_found, misses
from deployment.bench.perplexity import windows
from deployment.cli.main import app
from orca_core.attention.reference import ReferenceAttention
from orca_core.config import EMBEDDED_MODEL
from orca_core.cpu import Compute
from orca_core.models import load_model
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from tests.core.native_rig import kernels_or_skip
from tests.core.tiny_models import calmed, load, tiny_llama, transformers_logits
from tests.core.tiny_tokenizers import save_byte_level

VOCAB = 270
IDS = [(11 * i * i + 5 * i) % VOCAB for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    calmed(tiny_llama(vocab_size=VOCAB)).save_pretrained(path)
    save_byte_level(path)
    return path


def test_it_is_the_distance_from_what_transformers_says(folder: Path) -> None:
    """With pieces of unequal length, and an ours that is torch in bfloat16."""
    ours = load(folder, "bfloat16")
    found = measure_accuracy(Compute(ours, ReferenceAttention()), load(folder), windows(IDS, 25))
    narrow, wide = calmed(tiny_llama(vocab_size=VOCAB)).bfloat16(), calmed(tiny_llama(vocab_size=VOCAB))
    pieces = [list(piece[:-1]) for piece in windows(IDS, 25)]
    got, exact = (
        torch.cat([transformers_logits(model, piece).float() for piece in pieces]) for model in (narrow, wide)
    )
    assert found.n_positions == 24 + 24 + 9
    assert found.error == pytest.approx(float((got - exact).norm() / exact.norm()), rel=0.2)
    assert found.agreement == pytest.approx(float((got.argmax(1) == exact.argmax(1)).float().mean()), abs=0.06)
    assert 0 < found.error < found.worst_error < 0.2


def test_float32_is_itself(folder: Path) -> None:
    found = measure_accuracy(Compute(load(folder), ReferenceAttention()), load(folder), windows(IDS, 25))
    assert (found.n_positions, found.agreement, found.worst_gap) == (57, 1.0, 0.0)
    assert found.worst_error < 1e-5


def test_rounding_the_weights_counts_in_one_oracle_only(folder: Path) -> None:
    source = resolve_source(str(folder))
    found = measure_found(source, load_ours(source, "int4"), "int4", windows(IDS, 25))
    assert found.arithmetic.error < 0.02 < found.whole.error


def test_targets_that_are_missed_are_told_by_how_much() -> None:
    good, far, other = (Accuracy(9, error, 1.0, part, 0.0) for error, part in ((0.01, 0.98), (0.02, 1.0), (0.0, 0.9)))
    assert misses([Found("none", "d", "bfloat16", good, good)]) == []
    assert misses([Found("int4", "d", "bfloat16", good, far)]) == []  # rounding weights to 4 bits may cost more
    (first,) = misses([Found("int4", "d", "bfloat16", far, good)])
    assert "the same weights" in first
    assert "2.00%, 1%" in first
    (second,) = misses([Found("none", "d", "bfloat16", good, other)])
    assert "90.00%" in second
    assert misses([Found("none", "d", "bfloat16", Accuracy(9, torch.nan, 1.0, 1.0, 0.0), good)])


def test_the_command_fails_where_a_target_is_missed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", str(folder), "--positions", "32", "--json", str(tmp_path / "record.json"))
    monkeypatch.setattr(accuracy, "MIN_AGREEMENT", 0.0)
    monkeypatch.setattr(accuracy, "MAX_ERROR", 0.1)
    result = CliRunner().invoke(app, ["bench", "accuracy", "--quantization", "none", *options])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["missed"] == []
    assert record["found"][0]["arithmetic"]["n_positions"] == 32
    monkeypatch.setattr(accuracy, "MAX_ERROR", 1e-9)
    result = CliRunner().invoke(app, ["bench", "accuracy", "--quantization", "none", *options])
    assert result.exit_code == 1
    assert "of the logits is" in result.output


@pytest.mark.model
def test_the_kernels_are_near_float32_on_real_text() -> None:
    """The embedded model, over the same weights; ``bench accuracy`` looks at 2,000 positions."""
    kernels_or_skip()
    source = resolve_source(EMBEDDED_MODEL)
    ids = Tokenizer.load(source).encode(TEXTS[0].read_text())
    ours, pieces = load_ours(source, "none"), accuracy.pieces_of(ids, 128)
    oracle = load_model(source, dtype="float32", device=torch.device("cpu"))
    for weight in oracle.weights.tensors():
        weight.copy_(weight.bfloat16())  # type: ignore[union-attr]
    found = measure_accuracy(ours, oracle, pieces)
    assert type(ours.decoder).__name__ == "NativeDecoder"
    assert found.n_positions == 128
    assert found.misses() == []
