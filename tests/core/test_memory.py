"""How n_slots comes from measured memory."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orca_core.config import EngineConfig
from orca_core.errors import InsufficientMemoryError
from orca_core.host_memory import MemoryReading, read_host_memory
from orca_core.kv import KVManager, KVShape
from orca_core.memory import decide_n_slots, kv_budget_cpu, kv_budget_cuda

GIB = 1 << 30
SHAPE = KVShape(2, 2, 8, torch.float32)  # 256 bytes a slot


def config(**changes: object) -> EngineConfig:
    return EngineConfig(**{"max_batch_size": 4, "block_size": 8, "max_batch_tokens": 64, **changes})  # type: ignore[arg-type]


def test_the_pool_never_outgrows_the_budget_and_wastes_less_than_a_block() -> None:
    for budget in range(12_000, 60_000, 997):
        n_slots = decide_n_slots(config(), SHAPE, 10_000, budget, "cpu")
        used = KVManager.blocks_needed(n_slots, 8, 4) * 8 * SHAPE.bytes_per_slot
        assert budget - 8 * SHAPE.bytes_per_slot < used <= budget


def test_no_more_than_the_largest_batch_can_use() -> None:
    assert decide_n_slots(config(), SHAPE, 100, GIB, "cpu") == 400


def test_too_little_memory_is_an_error_with_both_numbers() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        decide_n_slots(config(), SHAPE, 100, 5000, "cpu")
    assert caught.value.available_bytes == 5000
    assert caught.value.needed_bytes == 5 * 8 * 256
    with pytest.raises(InsufficientMemoryError):
        decide_n_slots(config(n_slots=1000), SHAPE, 100, 100_000, "cpu")


def test_a_configured_number_is_taken_as_it_is() -> None:
    assert decide_n_slots(config(n_slots=77), SHAPE, 100, GIB, "cpu") == 77


def test_the_arithmetic_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decide_n_slots(config(max_kv_bytes=20_480), SHAPE, 10_000, GIB, "cpu")
    assert "n_slots=48" in caplog.text
    assert "256 bytes a slot" in caplog.text


def test_replicas_that_share_a_host_share_its_memory() -> None:
    reading = MemoryReading(total=16 * GIB, available=12 * GIB, used_by_us=GIB)
    assert kv_budget_cpu(reading, config(memory_share=0.5)) == 3 * GIB
    assert kv_budget_cpu(reading, config()) == 6 * GIB  # half of what is available, though the share would be 7
    assert kv_budget_cpu(MemoryReading(4 * GIB, GIB, 3 * GIB), config()) == 0


def test_on_a_gpu_others_and_the_peak_are_taken_off() -> None:
    """Field cases D10, D11: others' memory is not charged to us, nor given away; never negative."""
    reading = MemoryReading(total=80 * GIB, available=50 * GIB, used_by_us=10 * GIB)
    assert kv_budget_cuda(reading, 2 * GIB, config(memory_utilization=1.0)) == (80 - 20 - 10 - 2) * GIB
    assert kv_budget_cuda(MemoryReading(8 * GIB, 0, GIB), GIB, config()) == 0
    for free in range(9):  # never negative, never more than there is
        for peak in (0, GIB, 20 * GIB):
            budget = kv_budget_cuda(MemoryReading(8 * GIB, free * GIB, (8 - free) * GIB // 2), peak, config())
            assert 0 <= budget <= free * GIB


def test_engines_that_share_a_gpu_each_get_their_part() -> None:
    """Each was told 0.45; the second one starts when the first has taken all of its own, and finds as much."""
    ours = 5 * GIB  # weights
    first = kv_budget_cuda(MemoryReading(100 * GIB, 95 * GIB, ours), GIB, config(memory_utilization=0.45))
    assert first == (45 - 5 - 1) * GIB
    free = 100 * GIB - (first + GIB + ours) - ours
    second = kv_budget_cuda(MemoryReading(100 * GIB, free, ours), GIB, config(memory_utilization=0.45))
    assert abs(second - first) < 10


def test_the_pool_of_a_gpu_has_blocks_of_256_and_one_more_for_padding() -> None:
    gpu = EngineConfig(max_batch_size=4, max_batch_tokens=64)
    for extra in (0, 1):
        budget = 20 * 256 * SHAPE.bytes_per_slot
        n_slots = decide_n_slots(gpu, SHAPE, 100_000, budget, "cuda:0", extra_blocks=extra)
        assert n_slots == (20 - 4 - extra) * 256
    with pytest.raises(InsufficientMemoryError) as caught:
        decide_n_slots(gpu, SHAPE, 100_000, 1000, "cuda:1", extra_blocks=1)
    assert caught.value.needed_bytes == 6 * 256 * SHAPE.bytes_per_slot


def test_a_container_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{48 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {16 << 20}\n")
    reading = read_host_memory(tmp_path, tmp_path / "none")
    assert (reading.total, reading.available) == (64 << 20, 32 << 20)
    assert reading.bound == "what the memory limit of this cgroup leaves"


def test_what_the_machine_has_left_counts_where_that_is_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=64 << 20, available=8 << 20)
    monkeypatch.setattr("orca_core.host_memory.psutil.virtual_memory", lambda: memory)
    (tmp_path / "memory.max").write_text(f"{32 << 20}\n")
    (tmp_path / "memory.current").write_text("0\n")
    reading = read_host_memory(tmp_path, tmp_path / "none")
    assert (reading.total, reading.available) == (32 << 20, 8 << 20)
    assert reading.bound == "MemAvailable of this machine"


def test_no_container_limit_means_the_whole_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    reading = read_host_memory(tmp_path, tmp_path / "none")
    assert reading.total > reading.available > 0
