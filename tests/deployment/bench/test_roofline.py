from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deployment.bench import ceilings as ceilings_module
from deployment.bench.ceilings import Ceilings, measure_ceilings
from deployment.bench.laps import PARTS, Laps
from deployment.bench.roofline import Roofline, Subject
from deployment.bench.shapes import Shape, all_shapes, fitting, floor_s
from deployment.cli.main import app
from orca_core.errors import ConfigError
from orca_core.iterations import Iteration, IterationPart
from orca_core.kernels import KernelError
from tests.core.tiny_models import load, tiny_llama, tiny_qwen3
from tests.core.tiny_tokenizers import save_byte_level

CEILINGS = Ceilings({"slow": 1.0, "fast": 2.0}, {"product": 4.0})
POINT = {
    "model": str, "dtype": str, "quantization": str, "batch": int, "context": int, "ms": float, "floor_ms": float,
    "ratio": float, "parts": dict, "best_ms": float, "watched_ms": float, "read_ms": float, "product_ms": float,
    "n_runs": int, "foreign_cpu": float,
}  # fmt: skip
SLOT = 2 * 3 * 2 * 12 * 4  # of the model below: k and v, layers, heads, size, bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(path)
    save_byte_level(path)
    return path


# --- floors and ceilings ---------------------------------------------------------------------------------------------


def test_floors_are_counted_by_hand(folder: Path) -> None:
    decoder = load(folder)
    one = floor_s(decoder, Shape("increment", 3, 50), CEILINGS)
    two = floor_s(decoder, Shape("initiation", 1, 50), CEILINGS)
    embedding = 96 * 48
    weights = decoder.n_parameters - embedding
    # the row of an increment sees all 50, those of an initiation half as many in the mean; one row has a head
    rest = weights - embedding
    assert one == pytest.approx(
        ((4 * weights + 150 * SLOT) / 2e9, (2 * 3 * weights + 4 * 148.5 * 48 * 3) / 4e9)
    )  # fmt: skip
    assert two == pytest.approx(
        ((4 * weights + 50 * SLOT) / 2e9, (2 * (50 * rest + embedding) + 4 * 1250 * 48 * 3) / 4e9)
    )  # fmt: skip


def test_a_layer_with_a_window_reads_no_more_than_it(folder: Path) -> None:
    decoder = load(folder)
    first, *others = decoder.config.layers
    whole = floor_s(decoder, Shape("increment", 2, 50), CEILINGS)
    decoder.config = replace(decoder.config, layers=(replace(first, window=10), *others))
    windowed = floor_s(decoder, Shape("increment", 2, 50), CEILINGS)
    assert whole[0] - windowed[0] == pytest.approx(2 * 40 * SLOT / 3 / 2e9)
    assert whole[1] - windowed[1] == pytest.approx(4 * 2 * 39.5 * 48 / 4e9)


def test_the_floor_of_quantised_weights_is_their_bytes(folder: Path) -> None:
    read_s, _ = floor_s(load(folder, quantization="int8"), Shape("increment", 1, 50), CEILINGS)
    layer = (96 + 48 + 160) * 48 + 48 * 80 + 4 * (96 + 48 + 160 + 48)  # integers, and a scale an output
    weights = 3 * layer + 96 * (48 + 4) + 4 * 7 * 48  # the head, and norms in float32
    assert read_s == pytest.approx((weights + 50 * SLOT) / 2e9)


def test_ceilings_without_kernels_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise KernelError("no")

    monkeypatch.setattr(ceilings_module, "find_kernels", none)
    found = measure_ceilings(1 << 16, 1)
    assert set(found.read_gb_s) == {"torch sum"}
    assert all(name.startswith("torch linear") for name in found.product_gflop_s)
    assert found.bytes_per_s == found.read_gb_s["torch sum"] * 1e9 > 0
    assert found.record()["product_gflop_s"] == max(found.product_gflop_s.values())


def test_the_ceiling_of_float32_is_no_product_of_bfloat16() -> None:
    found = measure_ceilings(1 << 16, 1, torch.float32)
    assert found.product_dtype == "float32"
    assert all(name.startswith("torch linear") for name in found.product_gflop_s)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_all_shapes_are_those_that_were_promised() -> None:
    shapes = all_shapes(quick=False)
    increments = {(shape.batch, shape.context) for shape in shapes if shape.kind == "increment"}
    assert increments == {(batch, context) for batch in (1, 2, 4, 8, 16, 32) for context in (128, 1024)}
    assert [shape.context for shape in shapes if shape.kind == "initiation"] == [128, 512, 2048]
    assert set(all_shapes(quick=True)) < set(shapes)


def test_an_iteration_is_of_a_shape_where_all_its_parts_are() -> None:
    def iteration(*rows: tuple[int, bool]) -> Iteration:
        return Iteration(0.0, 1.0, tuple(IterationPart("r", n, initiation) for n, initiation in rows))

    two, prompt = Shape("increment", 2, 9), Shape("initiation", 1, 9)
    assert two.is_of(iteration((1, False), (1, False)))
    assert not two.is_of(iteration((1, False), (1, True)))
    assert not two.is_of(iteration((1, False)))
    assert prompt.is_of(iteration((9, True)))
    assert not prompt.is_of(iteration((8, True)))


def test_what_the_model_or_the_memory_does_not_take_is_left_out(folder: Path) -> None:
    decoder = load(folder)  # of 256 tokens
    small, large, long = Shape("increment", 1, 100), Shape("increment", 9, 100), Shape("initiation", 1, 255)
    shapes, left_out = fitting([small, large, long], decoder, 10, SLOT * 200)
    assert shapes == [small]
    assert [shape for shape, _ in left_out] == [large, long]
    assert "256 tokens" in left_out[1][1]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_what_passes_before_a_lap_is_its_part() -> None:
    times = iter([0.0, 5.0, 6.0, 8.0, 12.0, 20.0, 21.0])
    laps = Laps(lambda: next(times))
    laps.lap("python")  # before the first turn: nobody's
    laps.begin_turn()
    laps.lap("scheduler")
    laps.lap("python")
    laps.move("python", {"linear": 3.0})
    laps.begin_turn()
    laps.lap("scheduler")
    first, second = ({part: s for part, s in turn.items() if s} for turn in laps.turns)
    assert first == {"scheduler": 2.0, "python": 1.0, "linear": 3.0, "hand_over": 8.0}
    assert second == {"scheduler": 1.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [Shape("increment", 3, 40), Shape("initiation", 1, 70)])
def test_parts_add_up_to_the_turn(folder: Path, shape: Shape, dtype: Any) -> None:
    """In the CPU kernels, and in torch."""
    point = Roofline(Subject.load(str(folder), dtype, "none"), CEILINGS, [shape], 4, 60.0).measure(shape)
    assert tuple(point.parts) == PARTS
    assert sum(point.parts.values()) == pytest.approx(point.ms)
    assert min(point.parts.values()) >= 0
    assert min(value for part, value in point.parts.items() if part != "rest") > 0
    assert point.n_runs == 4
    assert point.best_ms <= point.ms
    assert point.ratio == point.ms / max(point.read_ms, point.product_ms)


def test_turns_of_increments_lie_around_the_context_and_prompts_are_feigned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[int] = []
    subject = Subject.load(str(folder), "float32", "none")
    decoder = subject.compute.decoder
    inner = decoder.next_logits

    def watched(batch: Any, pool: Any, attention: Any) -> torch.Tensor | None:
        contexts.append(batch.spans[0].context)
        return inner(batch, pool, attention)

    monkeypatch.setattr(decoder, "next_logits", watched)
    Roofline(subject, CEILINGS, [Shape("increment", 2, 50)], 5, 60.0).measure(Shape("increment", 2, 50))
    once = contexts[: len(contexts) // 2]  # the other half was watched
    assert contexts == once * 2
    assert once[2:-1] == [48, 49, 50, 51, 52]  # two to warm up, and a last one with no turn behind it


# --- the command -----------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr(ceilings_module, "measure_ceilings", lambda *_: CEILINGS)
    result = CliRunner().invoke(app, ["bench", "roofline", "--quick", *options])
    assert result.exit_code == 0, result.output
    return str(result.output)


def check_record(record: dict[str, Any]) -> None:
    """What others read out of it."""
    assert record["schema"] == "orca-serve/bench-roofline/1"
    assert {"read_gb_s", "product_gflop_s", "reads", "products"} <= set(record["ceilings"])
    points = record["increments"] + record["initiations"]
    for point in points:
        assert {name: type(value) for name, value in point.items()} == POINT
        assert tuple(point["parts"]) == PARTS
        assert sum(point["parts"].values()) == pytest.approx(point["ms"])
        assert point["ratio"] == pytest.approx(point["ms"] / point["floor_ms"])


def test_the_command_writes_a_record_and_a_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path, picture, before = tmp_path / "record.json", tmp_path / "picture.png", torch.get_num_threads()
    options = ("--json", str(path), "--plot", str(picture), "--quantization", "int4")
    output = run(monkeypatch, "--model", str(folder), *options)
    record = json.loads(path.read_text())
    check_record(record)
    assert [(point["batch"], point["context"]) for point in record["increments"]] == [(1, 128), (4, 128), (16, 128)]
    assert [(point["batch"], point["context"]) for point in record["initiations"]] == [(1, 128)]
    assert (record["threads"], record["quantization"], record["has_text"]) == (before, "int4", True)
    assert record["weight_bytes"] < load(folder, "bfloat16").weight_bytes / 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "/floor" in output


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])  # transformers finds an empty one for the first
def test_random_weights_without_a_tokenizer_will_do(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    run(monkeypatch, "--model", str(tmp_path), "--json", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    check_record(record)
    assert (record["has_text"], record["dtype"], record["left_out"]) == (False, "bfloat16", [])


def test_a_model_that_takes_no_shape_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "measure_ceilings", lambda *_: CEILINGS)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["bench", "roofline", "--quick", "--model", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "64 tokens" in result.output
