"""Packed weights kept for the next replica: the same decoder, whole or not at all, and never in the way."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orca_core.config import Quantization
from orca_core.cpu import choose_compute
from orca_core.kernels import Kernels
from orca_core.models import open_model, packed_file, weight_cache
from orca_core.models.native import NativeDecoder
from orca_core.models.packed import Packer
from orca_core.models.weight_cache import CACHE_VARIABLE, WeightCache, weights_cache
from orca_core.source import resolve_source
from tests.core.native_rig import CPU, Rig, kernels_or_skip
from tests.core.tiny_families import VARIANTS
from tests.core.tiny_models import calmed

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_or_skip()


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> list[int]:
    """One entry for each time a model was packed."""
    found: list[int] = []
    parts = Packer.parts

    def counted(packer: Packer) -> object:
        found.append(1)
        return parts(packer)

    monkeypatch.setattr(Packer, "parts", counted)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    calmed(VARIANTS["qwen2"]()).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def decoder(folder: Path, cache: Path | None, quantization: Quantization = "none") -> NativeDecoder:
    opened = open_model(resolve_source(str(folder)), dtype="bfloat16", device=CPU, quantization=quantization)
    made = choose_compute(opened, WeightCache(cache, worth_keeping=0)).decoder
    assert isinstance(made, NativeDecoder)
    return made


def logits(folder: Path, cache: Path | None, quantization: Quantization = "none") -> torch.Tensor:
    return Rig(decoder(folder, cache, quantization)).logits("a", IDS)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_what_is_kept_is_what_was_packed(
    packings: list[int], tmp_path: Path, name: str, quantization: Quantization
) -> None:
    calmed(VARIANTS[name]()).bfloat16().save_pretrained(tmp_path / "model")
    plain = decoder(tmp_path / "model", None, quantization)
    kept = [decoder(tmp_path / "model", tmp_path / "cache", quantization) for _ in range(2)]
    assert len(packings) == 2
    for each in kept:
        assert (each.n_parameters, each.weight_bytes) == (plain.n_parameters, plain.weight_bytes)
        assert torch.equal(Rig(each).logits("a", IDS), Rig(plain).logits("a", IDS))


def test_another_model_form_or_kernels_are_packed_for_themselves(
    packings: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for quantization in QUANTIZATIONS:
        logits(folder, cache, quantization)
    assert len(packings) == 3
    weights = folder / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[-2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = logits(folder, cache)
    assert len(packings) == 4
    assert torch.equal(changed, logits(folder, None))
    before = len(packings)
    monkeypatch.setattr(weight_cache, "_CODE", tmp_path)  # other code
    (tmp_path / "quantised.py").touch()
    logits(folder, cache)
    assert len(packings) == before + 1


def test_a_file_is_read_once_to_know_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "_FRESH_NS", -1)
    path, calls = folder / "model.safetensors", []
    digest = weight_cache.hashlib.file_digest
    monkeypatch.setattr(weight_cache.hashlib, "file_digest", lambda *a: calls.append(1) or digest(*a))
    known = [weight_cache._digest(tmp_path, path) for _ in range(2)]
    assert known[0] == known[1]
    assert len(calls) == 1
    path.write_bytes(path.read_bytes() + b" ")
    assert weight_cache._digest(tmp_path, path) != known[0]
    (note,) = [each for each in tmp_path.glob("*.source") if each.read_text() == known[0]]
    note.write_text("half")
    monkeypatch.setattr(weight_cache, "_FRESH_NS", 10**18)  # as if it had just been changed: not to be relied on
    assert len({weight_cache._digest(tmp_path, path) for _ in range(2)}) == 1


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: bytes(content[:-1]),
        "half": lambda: bytes(content[:middle]),
        "empty": lambda: b"",
        "lost page": lambda: bytes(content[:4096]) + bytes(4096) + bytes(content[8192:]),
        "turned bit": lambda: bytes(content[:middle]) + bytes([content[middle] ^ 4]) + bytes(content[middle + 1 :]),
        "table": lambda: bytes(content).replace(b'"n_out"', b'"n_owt"', 1),
        "longer": lambda: b"x" + bytes(content),
    }
    path.write_bytes(changes[how]())


@pytest.mark.parametrize("how", ["cut", "half", "empty", "lost page", "turned bit", "table", "longer"])
def test_a_damaged_file_is_made_again(
    packings: list[int], folder: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.packed")
    whole = path.read_bytes()
    damage(path, how)
    assert torch.equal(logits(folder, tmp_path / "cache"), expected)
    assert "damaged" in caplog.text
    assert path.read_bytes() == whole
    assert len(packings) == 2


def test_a_full_disk_is_no_disaster(
    packings: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, packer: Packer) -> None:
        for _ in packer.parts():
            break
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_cache, "write_packed", full)
    assert torch.equal(logits(folder, tmp_path / "cache"), logits(folder, None))
    assert not [each for each in (tmp_path / "cache").iterdir() if each.suffix not in (".lock", ".source")]


def test_nor_is_a_folder_that_cannot_be_written_to_or_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for cache in (tmp_path / "file" / "cache", tmp_path / "open"):
        assert torch.equal(logits(folder, cache), logits(folder, None))
    assert list((tmp_path / "open").iterdir()) == []


def test_a_folder_is_used_though_nobody_may_write_there(
    packings: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(folder, tmp_path / "cache")
    monkeypatch.setattr(weight_cache, "locked", lambda _: pytest.fail("was asked for"))
    logits(folder, tmp_path / "cache")
    assert len(packings) == 1


def load_once(folder: Path, cache: Path) -> int:
    packed = 0
    parts = Packer.parts

    def counted(packer: Packer) -> object:
        nonlocal packed
        packed += 1
        return parts(packer)

    Packer.parts = counted  # type: ignore[method-assign,assignment]
    torch.set_num_threads(1)
    decoder(folder, cache)
    return packed


def test_replicas_that_start_together_pack_once(kernels: Kernels, folder: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        packed = pool.starmap(load_once, [(folder, tmp_path / "cache")] * 3, chunksize=1)
    assert sum(packed) == 1


def test_who_mapped_a_file_keeps_it(folder: Path, tmp_path: Path) -> None:
    kept = decoder(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.packed")
    path.unlink()
    assert torch.equal(Rig(kept).logits("a", IDS), logits(folder, None))


@pytest.mark.parametrize("large", [True, False])
def test_mapped_and_copied_are_the_same(
    folder: Path, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "has_large_pages", lambda _: large)
    logits(folder, tmp_path / "cache")
    assert torch.equal(logits(folder, tmp_path / "cache"), logits(folder, None))


def test_large_pages_are_what_the_system_says(tmp_path: Path) -> None:
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    begin = memory.data_ptr()
    text = "{:x}-{:x} r--s 0 fe:00 1 /x\nRss: 8192 kB\nFilePmdMapped: {} kB\nVmFlags: rd\n"
    for kib, expected in ((8192, True), (0, False)):
        (tmp_path / "smaps").write_text(text.format(1, 4096, 8192) + text.format(begin, begin + memory.nbytes, kib))
        assert packed_file.has_large_pages(memory, tmp_path / "smaps") is expected
    assert not packed_file.has_large_pages(memory, tmp_path / "none")


def test_what_was_used_least_recently_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "old", "oldest")):
        path = tmp_path / f"{name}.packed"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda _: usage)
    weight_cache._make_room(tmp_path / "next.packed", 100)  # of 400 it may take half
    assert {path.stem for path in tmp_path.glob("*.packed")} == {"new"}
    with pytest.raises(OSError, match="too full"):
        weight_cache._make_room(tmp_path / "next.packed", 300)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert weights_cache() == tmp_path / "orca-serve" / "weights"
    monkeypatch.setenv(CACHE_VARIABLE, "/y/z")
    assert weights_cache() == Path("/y/z")
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert weights_cache() is None
