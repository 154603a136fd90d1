"""What the system refuses the kernels: threads and memory. Nothing of it may end the process."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orca_core.kernels import Heads, Kernels, SpanTable
from orca_core.kernels.build import SOURCES, KernelError, find_compiler
from orca_core.kernels.structs import CAttentionSpec
from tests.core.native_rig import kernels_or_skip

HERE = Path(__file__).parent


def said_by(harness: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a program that is built with the workers."""
    kernels_or_skip()
    try:
        compiler = find_compiler()
    except KernelError as error:
        pytest.skip(str(error))
    program = folder / "harness"
    sources = [str(HERE / harness), str(SOURCES / "workers.cpp")]
    subprocess.run(
        [compiler, "-O1", "-std=c++17", "-pthread", f"-I{SOURCES}", *sources, "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


def test_workers_that_throw_or_are_not_to_be_had(tmp_path: Path) -> None:
    assert said_by("faults_harness.cpp", tmp_path) == (0, "fine\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
def test_each_worker_has_a_cpu_of_its_own_and_long_slices_and_its_caller_is_free_afterwards(tmp_path: Path) -> None:
    assert said_by("places_harness.cpp", tmp_path) == (0, "fine\n")


def attend(kernels: Kernels, context: int) -> torch.Tensor:
    """One row of 512 heads. Where it sees much, segments are computed apart, 66 MiB of them for 64 Ki positions."""
    pool = torch.ones(1, 16, 1, 256, dtype=torch.bfloat16)
    table = SpanTable.of([(0, 1, context, [0] * (context // 16))], 16)
    q = torch.ones(1, 512, 256, dtype=torch.bfloat16)
    return kernels.attend(table, Heads(512, 1, 256), CAttentionSpec(1.0, 0.0, 0), q, pool, pool)


def pages_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def without_memory(n_threads: int) -> list[str]:
    """In a process of its own: what calls say that find no memory, and what one says afterwards."""
    kernels = kernels_or_skip()
    torch.set_num_threads(n_threads)
    attend(kernels, 64)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages_in_use() * 4096 + (16 << 20), before[1]))
    said = [outcome(lambda: attend(kernels, 1 << 16)) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_AS, before)
    return [*said, outcome(lambda: attend(kernels, 64))]


def outcome(call: Callable[[], torch.Tensor]) -> str:
    try:
        return str(bool((call() == 1).all()))
    except MemoryError as error:
        return str(error)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_no_memory_is_an_error_of_the_call(n_threads: int) -> None:
    kernels_or_skip()
    # not forked: what was allocated and freed before would be there to be had
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.apply_async(without_memory, (n_threads,)).get(timeout=60)
    complaint = "the kernels found no memory for what they work with"
    assert said == [complaint, complaint, "True"]
