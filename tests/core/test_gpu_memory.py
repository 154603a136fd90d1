"""The arithmetic of a GPU's memory, over readings that are made up."""

from __future__ import annotations

import logging

import pytest
import torch

from orca_core.config import EngineConfig
from orca_core.errors import InsufficientMemoryError
from orca_core.gpu_memory import (
    MAX_WAIT_S,
    PATIENCE_S,
    measure_kept,
    measure_peak,
    out_of_memory_with_numbers,
    wait_for_memory,
)
from orca_core.host_memory import MemoryReading
from tests.core.gpu_stand_in import FakeMeter

GIB = 1 << 30


class Predecessor:
    """A GPU of 80 GiB on which another process gives back memory at given times; the clock runs while one sleeps."""

    def __init__(self, free: dict[float, int]) -> None:
        self._free = free
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> MemoryReading:
        passed = self.now - 1000.0
        free = next(free for at, free in sorted(self._free.items(), reverse=True) if at <= passed)
        return MemoryReading(80 * GIB, free, 0)

    def wait(self, **changes: float) -> MemoryReading:
        return wait_for_memory(self.read, EngineConfig(**changes), clock=self.clock, sleep=self.sleep)  # type: ignore[arg-type]


def test_nobody_waits_for_memory_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Predecessor({0.0: 79 * GIB})
    assert gpu.wait().available == 79 * GIB
    assert gpu.now == 1000.0
    assert not caplog.records


def test_a_predecessor_on_its_way_out_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """D14: it starts to let go after 3 s, is done after 9, and the log says why nothing happened."""
    gpu = Predecessor({0.0: 8 * GIB, 3.0: 30 * GIB, 6.0: 50 * GIB, 9.0: 79 * GIB})
    assert gpu.wait().available == 79 * GIB
    assert 9.0 <= gpu.now - 1000.0 < 10.0
    assert "8192 MiB of the GPU are free" in caplog.text
    assert len(caplog.records) == 1


def test_a_resident_neighbour_costs_a_little_patience(caplog: pytest.LogCaptureFixture) -> None:
    """D11: it holds 30% and will go on doing so."""
    gpu = Predecessor({0.0: 56 * GIB})
    assert gpu.wait().available == 56 * GIB
    assert PATIENCE_S <= gpu.now - 1000.0 < PATIENCE_S + 1
    assert "other processes hold 24576 MiB" in caplog.text


def test_an_engine_with_half_a_gpu_waits_for_no_more_than_its_half() -> None:
    gpu = Predecessor({0.0: 40 * GIB})
    gpu.wait(memory_utilization=0.45)
    assert gpu.now == 1000.0


def test_no_wait_is_for_ever() -> None:
    gpu = Predecessor({float(second): second << 25 for second in range(10_000)})
    gpu.wait()
    assert MAX_WAIT_S <= gpu.now - 1000.0 < MAX_WAIT_S + 1


@pytest.mark.parametrize(("tensors", "reserved", "expected"), [(5, 7, 7), (7, 5, 7), (0, 0, 0)])
def test_the_peak_is_of_what_was_added(tensors: int, reserved: int, expected: int) -> None:
    meter = FakeMeter()
    meter.allocated, meter.reserved = 100, 120

    def run() -> None:
        meter.use(tensors, reserved)
        meter.use(-tensors, -reserved)

    assert measure_peak(meter, run) == expected
    assert measure_peak(meter, run) == expected  # an earlier peak does not count again


def test_what_is_kept_counts_in_and_beside_the_allocator() -> None:
    meter = FakeMeter()
    assert measure_kept(meter, lambda: meter.use(30, 40, beside=5)) == 45
    assert measure_kept(meter, lambda: meter.use(30, 40, others=-1000)) == 40  # a neighbour leaves meanwhile
    assert measure_kept(meter, lambda: meter.use(0, 0)) == 0


def test_out_of_memory_at_start_is_an_error_with_numbers() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
        "free. Process 7 has 60.00 GiB memory in use."
    )
    reading = MemoryReading(80 * GIB, GIB, 16 * GIB)
    with (
        pytest.raises(InsufficientMemoryError) as caught,
        out_of_memory_with_numbers(torch.device("cuda:0"), lambda: reading),
    ):
        raise torch.OutOfMemoryError(text)
    assert (caught.value.available_bytes, caught.value.needed_bytes) == (17 * GIB, 17 * GIB + GIB // 2)
    assert str(caught.value).startswith("cuda:0 has 17408 MiB left for weights")


def test_out_of_memory_without_a_number_needs_more_than_there_is() -> None:
    with (
        pytest.raises(InsufficientMemoryError) as caught,
        out_of_memory_with_numbers(torch.device("cuda:0"), lambda: MemoryReading(8 * GIB, 3, 4)),
    ):
        raise torch.OutOfMemoryError("out of memory")
    assert (caught.value.available_bytes, caught.value.needed_bytes) == (7, 8)


def test_other_errors_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        pytest.raises(ZeroDivisionError),
        out_of_memory_with_numbers(torch.device("cuda:0"), lambda: MemoryReading(1, 1, 1)),
    ):
        raise ZeroDivisionError
