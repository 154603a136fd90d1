"""Compiling the kernels: once, by one, whole or not at all; and what is said where it cannot be done."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orca_core.kernels import build as build_module
from orca_core.kernels import variants
from orca_core.kernels.__main__ import main
from orca_core.kernels.build import KernelError, build, default_cache, find_compiler
from orca_core.kernels.variants import SWITCH, VARIANTS, choose_variant, cpu_features, find_kernels

HASWELL = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
ZEN4 = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in $VERSION"; exit 0; fi
echo called >> {log}
while [ $# -gt 1 ]; do shift; done
{action}
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a compiler that notes each call and then does something with its last argument, the library."""

    def make(action: str = 'echo library > "$1"') -> Path:
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(log=tmp_path / "log", action=action))
        path.chmod(0o755)
        return path

    return make


def calls(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def build_one(compiler: str, cache: Path) -> str:
    return str(build((), compiler=compiler, cache=cache))


def test_it_is_compiled_once(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    made = [build((), compiler=str(compiler()), cache=tmp_path / "cache") for _ in range(3)]
    assert len(set(made)) == 1
    assert made[0].read_text() == "library\n"
    assert calls(tmp_path) == 1


def test_other_flags_or_another_compiler_make_another_library(
    tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = str(compiler()), tmp_path / "cache"
    made = {build(flags, compiler=path, cache=cache) for flags in ((), ("-a",), ("-a", "-b"), ("-a-b",))}
    monkeypatch.setenv("VERSION", "2")
    made.add(build((), compiler=path, cache=cache))
    assert len(made) == 5


def test_other_sources_make_another_library(
    tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = str(compiler()), tmp_path / "cache"
    before = build((), compiler=path, cache=cache)
    sources = tmp_path / "src"
    shutil.copytree(build_module.SOURCES, sources)
    (sources / "tile.h").write_text("// changed\n" + (sources / "tile.h").read_text())
    monkeypatch.setattr(build_module, "SOURCES", sources)
    assert build((), compiler=path, cache=cache) != before


def test_processes_that_start_together_compile_it_once(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    path = str(compiler('i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo library > "$1"'))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.starmap(build_one, [(path, tmp_path / "cache")] * 8)
    assert len(set(made)) == 1
    assert calls(tmp_path) == 1


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    path = compiler('echo half > "$1"; echo "no room" >&2; exit 3')
    cache = tmp_path / "cache"
    with pytest.raises(KernelError, match="failed \\(3\\): no room"):
        build((), compiler=str(path), cache=cache)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]
    assert build((), compiler=str(compiler()), cache=cache).read_text() == "library\n"


@pytest.mark.parametrize("damage", ["cut", "emptied", "turned", "no sum", "empty sum", "odd sum"])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, compiler: Callable[[str], Path], damage: str) -> None:
    """Whoever maps a file that ends too early dies of SIGBUS."""
    path, cache = str(compiler()), tmp_path / "cache"
    library = build((), compiler=path, cache=cache)
    sums = library.with_suffix(".sha256")
    {
        "cut": lambda: library.write_text("libr"),
        "emptied": lambda: library.write_text(""),
        "turned": lambda: library.write_text("librarx\n"),
        "no sum": sums.unlink,
        "empty sum": lambda: sums.write_text(""),
        "odd sum": lambda: sums.write_bytes(b"\xff\xfe"),
    }[damage]()
    for _ in range(2):
        assert build((), compiler=path, cache=cache).read_text() == "library\n"
    assert calls(tmp_path) == 2


def test_an_old_mapping_outlives_a_new_build(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    """The file is replaced, never written to: other processes run what is in it."""
    path, cache = str(compiler()), tmp_path / "cache"
    library = build((), compiler=path, cache=cache)
    library.write_text("damaged")
    with library.open() as mapped:
        build((), compiler=path, cache=cache)
        assert mapped.read() == "damaged"


def test_what_a_killed_build_left_is_swept(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    path, cache = str(compiler()), tmp_path / "cache"
    library = build((), compiler=path, cache=cache)
    (cache / f"{library.stem}-abc").mkdir()
    (cache / f"{library.stem}-abc" / library.name).write_text("half")
    (cache / "orca-other-abc").mkdir()  # another library's, which may be being built
    library.unlink()
    build((), compiler=path, cache=cache)
    left = {each.name for each in cache.iterdir()}
    assert left == {library.name, f"{library.stem}.sha256", f"{library.stem}.lock", "orca-other-abc"}


def test_a_compiler_that_makes_nothing(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    with pytest.raises(KernelError, match="empty library"):
        build((), compiler=str(compiler(': > "$1"')), cache=tmp_path / "cache")


def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(KernelError, match="can be written by"):
        build((), compiler=str(compiler()), cache=cache)
    assert calls(tmp_path) == 0


def test_what_an_image_holds_is_used_though_nobody_may_write_there(
    tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = str(compiler()), tmp_path / "cache"
    made = build((), compiler=path, cache=cache)
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1000)
    monkeypatch.setattr(build_module, "_ROOT", owner)

    def read_only(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(build_module, "locked", read_only)
    assert build((), compiler=path, cache=cache) == made
    with pytest.raises(KernelError, match="Read-only"):
        build(("-other",), compiler=path, cache=cache)
    monkeypatch.setattr(build_module, "_ROOT", owner + 1)
    with pytest.raises(KernelError, match="belongs to"):
        build((), compiler=path, cache=cache)


def test_all_that_a_kind_of_machine_may_need_is_compiled_for_an_image(
    tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(compiler()))
    monkeypatch.setenv("ORCA_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    main()
    lines = [f"{variant.name}: {build(variant.flags)}\n" for variant in VARIANTS]
    assert capsys.readouterr().out == "".join(lines)
    assert calls(tmp_path) == len(VARIANTS) > 1
    monkeypatch.setattr("platform.machine", lambda: "none")
    main()
    assert capsys.readouterr().out == ""


def test_a_cache_of_our_own_is_closed_to_others(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    build((), compiler=str(compiler()), cache=tmp_path / "a" / "cache")
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_made_is_no_disaster(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelError, match="could not be built"):
        build((), compiler=str(compiler()), cache=tmp_path / "file" / "cache")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(KernelError, match="my-compiler"):
        find_compiler()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORCA_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "orca-serve" / "kernels"
    monkeypatch.setenv("ORCA_KERNELS_CACHE", "/y/z")
    assert default_cache() == Path("/y/z")


def test_where_it_is_for_who_has_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("ORCA_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_cache() == tmp_path / f"orca-serve-kernels-{os.getuid()}"


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    with pytest.raises(KernelError, match="turned off"):
        find_kernels()


def test_features_are_read_from_the_first_cpu(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_features(path) == {"fpu", "avx2", "fma"}
    assert cpu_features(tmp_path / "none") == frozenset()


def test_a_cpu_without_the_instructions_gets_none() -> None:
    last = VARIANTS[-1]
    for features, machine in (
        (last.needs - {"avx2"}, "x86_64"),
        (frozenset(), "x86_64"),
        (ZEN4, "aarch64"),
        (ZEN4, ""),
    ):
        with pytest.raises(KernelError, match="none of the instruction sets"):
            choose_variant(features, machine)


def test_an_arm_machine_computes_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(variants, "cpu_features", lambda: frozenset({"fp", "asimd", "bf16", "sve"}))
    monkeypatch.setattr(variants, "build", lambda _: pytest.fail("was compiled"))
    with pytest.raises(KernelError, match="none of the instruction sets"):
        find_kernels()


@pytest.mark.parametrize(("features", "name"), [
    (ZEN4, "avx512_bf16"), (ZEN4 | {"amx_bf16", "amx_tile"}, "avx512_bf16"), (ZEN4 - {"avx512_bf16"}, "avx512"),
    (ZEN4 - {"avx512vl"}, "avx2"), (HASWELL, "avx2"),
])  # fmt: skip
def test_a_cpu_gets_the_best_it_can_run(features: frozenset[str], name: str) -> None:
    assert choose_variant(features, "x86_64").name == name


def test_a_variant_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(variants, "load_variant", lambda variant: loaded.append(variant.name))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(variants, "cpu_features", lambda: ZEN4)
    for name in ("", "avx2", "AVX512"):
        monkeypatch.setenv(SWITCH, name)
        find_kernels()
    assert loaded == ["avx512_bf16", "avx2", "avx512"]
    monkeypatch.setattr(variants, "cpu_features", lambda: HASWELL)
    with pytest.raises(KernelError, match=r"\(avx512\)"):  # by its name, too, only where it runs
        find_kernels()
