from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deployment.bench import roofline
from deployment.bench.roofline import Ceilings, Roofline, measure_ceilings
from deployment.cli.main import app
from orca_core.attention.reference import ReferenceAttention
from orca_core.kernels import KernelError
from tests.core.tiny_models import load, tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

CEILINGS = Ceilings({"slow": 1.0, "fast": 2.0}, {"product": 4.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(path)
    save_byte_level(path)
    return path


def test_floors_are_counted_by_hand(folder: Path) -> None:
    decoder = load(folder)
    bench = Roofline(decoder, ReferenceAttention(), CEILINGS, n_slots=400)
    one, two = bench.increments(3, 1, context=50), bench.initiation(50, 1)
    embedding, slot = 96 * 48, 2 * 3 * 2 * 12 * 4  # layers x (k and v) x heads x size x bytes
    weights = decoder.n_parameters - embedding
    assert one.read_ms == pytest.approx(1000 * (4 * weights + 150 * slot) / 2e9)
    assert two.read_ms == pytest.approx(1000 * (4 * weights + 50 * slot) / 2e9)
    # the row of an increment sees all 50, those of an initiation half as many in the mean; one row has a head
    rest = weights - embedding
    assert one.product_ms == pytest.approx(1000 * (2 * 3 * weights + 4 * 148.5 * 48 * 3) / 4e9)
    assert two.product_ms == pytest.approx(1000 * (2 * (50 * rest + embedding) + 4 * 1250 * 48 * 3) / 4e9)
    assert one.of_floor == one.ms / max(one.read_ms, one.product_ms)
    assert (one.n_requests, one.n_rows, two.n_requests, two.n_rows) == (3, 3, 1, 50)
    assert one.ms > 0 < one.attention_ms


def test_the_floor_of_quantised_weights_is_their_bytes(folder: Path) -> None:
    decoder = load(folder, quantization="int8")
    point = Roofline(decoder, ReferenceAttention(), CEILINGS, n_slots=400).increments(1, 1, context=50)
    layer = (96 + 48 + 160) * 48 + 48 * 80 + 4 * (96 + 48 + 160 + 48)  # integers, and a scale an output
    weights = 3 * layer + 96 * (48 + 4) + 4 * 7 * 48  # the head, and norms in float32
    assert point.read_ms == pytest.approx(1000 * (weights + 50 * 2 * 3 * 2 * 12 * 4) / 2e9)


def test_ceilings_without_kernels_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise KernelError("no")

    monkeypatch.setattr(roofline, "find_kernels", none)
    found = measure_ceilings(1 << 16, 1)
    assert (set(found.read_gb_s), set(found.product_gflop_s)) == ({"torch sum"}, {"torch linear"})
    assert found.bytes_per_s == found.read_gb_s["torch sum"] * 1e9 > 0


def test_the_command_writes_a_record(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure_ceilings", lambda n_bytes, n_runs: CEILINGS)
    path = tmp_path / "record.json"
    before = torch.get_num_threads()
    result = CliRunner().invoke(
        app, ["bench", "roofline", "--quick", "--model", str(folder), "--json", str(path), "--quantization", "int4"]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert [point["n_rows"] for point in record["points"]] == [1, 4, 16, 128]
    assert (record["threads"], record["quantization"]) == (before, "int4")
    assert record["weight_bytes"] < load(folder, "bfloat16").weight_bytes / 2
    assert "/floor" in result.output
