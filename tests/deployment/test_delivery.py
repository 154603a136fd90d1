"""Tokens of a stream share a message where there is no CPU for one each; the first and the last never wait."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from deployment import pace as pace_module
from deployment.delivery import HELD, Delivery
from deployment.feed import Feed
from deployment.pace import LOOK_S, Pace, cpu_times, wanted_s
from orca_core.types import FinishReason, GenerationChunk
from tests.deployment.plane import Clock, settle


def chunk(*ids: int, finish: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk("r", "".join(f"{token_id}," for token_id in ids), ids, finish_reason=finish)


class Reader:
    """Of one stream: what it read, message by message."""

    def __init__(self, clock: Clock) -> None:
        self.feed = Feed(100, clock)
        self.messages: list[tuple[int, ...]] = []
        self.read = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            said = await self.feed.next()
            self.messages.append(said.token_ids)
            self.read.set()
            if said.finish_reason is not None:
                return


class Bench:
    """Two streams of one link, whose clock stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.interval_s = 0.0
        self.delivery = Delivery(lambda: self.interval_s, self.clock)
        self.one, self.other = Reader(self.clock), Reader(self.clock)

    async def parcel(
        self, one: GenerationChunk | None, other: GenerationChunk | None = None, after_s: float = 0.0
    ) -> None:
        self.clock.now += after_s
        self.delivery.begin()
        for reader, said in ((self.one, one), (self.other, other)):
            if said is not None:
                assert self.delivery.put(reader.feed, said)
        await settle()

    async def end(self) -> None:
        self.one.task.cancel()
        self.other.task.cancel()
        self.delivery.close()
        await settle()


async def test_without_an_interval_every_parcel_wakes() -> None:
    bench = Bench()
    for index in range(3):
        await bench.parcel(chunk(index), chunk(index + 10))
    assert bench.one.messages == [(0,), (1,), (2,)]
    assert bench.other.messages == [(10,), (11,), (12,)]
    await bench.end()


async def test_what_comes_within_the_interval_shares_a_message() -> None:
    bench = Bench()
    bench.interval_s = 10.0 / HELD
    await bench.parcel(chunk(0))
    for index in (1, 2, 3):
        await bench.parcel(chunk(index), after_s=3.0)
    assert bench.one.messages == [(0,)]
    await bench.parcel(chunk(4), after_s=2.0)
    assert bench.one.messages == [(0,), (1, 2, 3, 4)]
    await bench.end()


async def test_tokens_that_are_further_apart_than_the_interval_leave_at_once() -> None:
    bench = Bench()
    bench.interval_s = 10.0 / HELD
    for index in range(3):
        await bench.parcel(chunk(index), after_s=11.0)
    assert bench.one.messages == [(0,), (1,), (2,)]
    await bench.end()


async def test_what_the_replica_has_spaced_by_the_interval_is_not_held_again() -> None:
    """Nor if it comes a little early, or behind a parcel that was sent for somebody else's first word."""
    bench = Bench()
    bench.interval_s = 10.0
    await bench.parcel(chunk(0))
    await bench.parcel(chunk(1), after_s=9.0)
    await bench.parcel(None, chunk(10), after_s=4.0)
    await bench.parcel(chunk(2), after_s=6.0)
    assert bench.one.messages == [(0,), (1,), (2,)]
    await bench.end()


async def test_the_first_token_and_the_last_do_not_wait() -> None:
    bench = Bench()
    bench.interval_s = 1000.0 / HELD
    await bench.parcel(chunk(0))
    await bench.parcel(chunk(1), chunk(10), after_s=1.0)
    assert (bench.one.messages, bench.other.messages) == ([(0,)], [(10,)])
    await bench.parcel(chunk(2), chunk(11, finish=FinishReason.LENGTH), after_s=1.0)
    assert (bench.one.messages, bench.other.messages) == ([(0,)], [(10,), (11,)])
    await bench.end()


async def test_nothing_is_held_longer_than_the_interval_though_nothing_more_comes() -> None:
    bench = Bench()
    bench.interval_s = 0.001
    await bench.parcel(chunk(0))
    bench.delivery.begin()  # the clock stands still: within the interval
    bench.one.read.clear()
    assert bench.delivery.put(bench.one.feed, chunk(1))
    await bench.one.read.wait()
    assert bench.one.messages == [(0,), (1,)]
    await bench.end()


async def test_a_link_that_closes_holds_nothing_back() -> None:
    bench = Bench()
    bench.interval_s = 1000.0 / HELD
    await bench.parcel(chunk(0))
    await bench.parcel(chunk(1))
    bench.delivery.close()
    await settle()
    assert bench.one.messages == [(0,), (1,)]
    await bench.end()


# ---- how often


class Loop:
    """An event loop that wants a CPU for so large a part of the time."""

    def __init__(self, longest_s: float = 0.01) -> None:
        self.clock = Clock(7.0)
        self.wanted = 123.0
        self.busy = self.total = 1e6
        self.pace = Pace(longest_s, self.clock, lambda: self.wanted, lambda: (self.busy, self.total), n_cpus=2)
        self.pass_(0.0)

    def pass_(self, share: float, seconds: float = 1.25 * LOOK_S, used: float = 0.0, rate: float = 0.0) -> float:
        """``used``: part of the machine's CPUs in use meanwhile; ``rate``: tokens a second that came."""
        self.clock.now += seconds
        self.wanted += share * seconds
        self.busy, self.total = self.busy + used * 200 * seconds, self.total + 200 * seconds
        self.pace.count(round(rate * seconds))
        return self.pace.interval_s()


def test_a_loop_that_has_time_sends_every_token() -> None:
    loop = Loop()
    assert [loop.pass_(0.8) for _ in range(20)] == [0.0] * 20


def test_a_loop_without_time_sends_less_and_less_often_to_a_limit() -> None:
    loop = Loop(0.01)
    assert [loop.pass_(0.95) for _ in range(5)] == [0.0025, 0.005, 0.01, 0.01, 0.01]


def test_in_between_it_stays_as_it_is_and_with_time_it_returns_to_every_token() -> None:
    loop = Loop(0.01)
    for _ in range(5):
        loop.pass_(1.0)
    assert [loop.pass_(0.7) for _ in range(5)] == [0.01] * 5
    assert [loop.pass_(0.3) for _ in range(5)] == [0.005, 0.0025, 0.0, 0.0, 0.0]


def test_what_was_before_the_first_look_counts_for_nothing() -> None:
    clock = Clock(0.0)
    pace = Pace(0.01, clock, lambda: 1000.0, lambda: (0.0, 0.0))
    clock.now = 5.0
    assert pace.interval_s() == 0.0


def test_it_looks_now_and_then_only() -> None:
    loop = Loop()
    assert loop.pass_(1.0, 0.6 * LOOK_S) == 0.0
    assert loop.pass_(1.0, 0.6 * LOOK_S) > 0.0


def test_beside_a_model_that_needs_all_cpus_messages_are_fewer() -> None:
    """A loop that wants little itself: what its messages take, on all sides, the model on the same CPUs loses."""
    loop = Loop(0.01)
    assert [loop.pass_(0.1, used=0.95, rate=800.0) for _ in range(4)] == [0.01] * 4
    assert [loop.pass_(0.1, used=0.7, rate=800.0) for _ in range(3)] == [0.01] * 3
    assert [loop.pass_(0.1, used=0.5, rate=800.0) for _ in range(3)] == [0.005, 0.0025, 0.0]


def test_a_few_streams_beside_it_get_every_token_at_once() -> None:
    loop = Loop(0.01)
    assert [loop.pass_(0.1, used=1.0, rate=190.0) for _ in range(10)] == [0.0] * 10
    loop.pass_(0.1, used=1.0, rate=800.0)
    assert loop.pass_(0.1, used=1.0, rate=190.0) == 0.01
    assert [loop.pass_(0.1, used=1.0, rate=90.0) for _ in range(3)] == [0.005, 0.0025, 0.0]


def test_many_tokens_on_cpus_with_room_leave_at_once() -> None:
    loop = Loop(0.01)
    assert [loop.pass_(0.5, used=0.75, rate=50_000.0) for _ in range(10)] == [0.0] * 10


def test_what_the_cpus_do_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy, total = cpu_times()
    assert 0 < busy < total
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 800 50 5 5 40 7 8\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    monkeypatch.setattr(pace_module, "_STAT", stat)
    assert cpu_times() == (200.0, 1050.0)  # guests are among user and nice already
    stat.write_text("nothing")
    assert cpu_times() == (0.0, 0.0)
    monkeypatch.setattr(pace_module, "_STAT", tmp_path / "missing")
    assert cpu_times() == (0.0, 0.0)


def test_it_can_be_switched_off() -> None:
    loop = Loop(0.0)
    assert [loop.pass_(1.0) for _ in range(5)] == [0.0] * 5


def test_a_thread_wants_a_cpu_while_it_works_and_not_while_it_waits() -> None:
    """No more than time on the clock, no less than time on a CPU; each thread for itself."""
    before, clock, ran = wanted_s(), time.monotonic(), time.thread_time()
    total = 0
    while time.thread_time() - ran < 0.02:
        total += 1
    worked = time.thread_time() - ran
    assert worked * 0.5 <= wanted_s() - before <= (time.monotonic() - clock) * 1.5
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(wanted_s()))
    thread.start()
    thread.join()
    assert found[0] < 1.0


def test_without_the_kernels_word_it_is_the_time_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    from deployment import pace

    assert isinstance(tmp_path, Path)
    for odd in (tmp_path / "absent", tmp_path / "odd"):
        monkeypatch.setattr(pace, "_SCHEDSTAT", odd)
        before = time.thread_time()
        assert before <= wanted_s() <= time.thread_time()
        (tmp_path / "odd").write_text("what")
