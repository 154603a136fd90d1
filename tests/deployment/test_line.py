"""The waiting line and the rate at which it moves, in virtual time."""

from __future__ import annotations

import pytest

from deployment.entry import Entry
from deployment.feed import Feed
from deployment.line import FORGET_S, RETRY_RANGE_S, UNKNOWN_RETRY_S, SlotRate, WaitingLine
from orca_core.errors import OverloadedError
from orca_core.types import GenerationRequest
from tests.deployment.plane import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


def an_entry(number: int, demand: int = 10, deadline: float = 1e9) -> Entry:
    request = GenerationRequest(f"r{number}", (1,), demand - 1, 0)
    return Entry(request, "mine", deadline, Feed(100, lambda: 0.0), number=number)


def test_order_is_by_number_whenever_one_joins(clock: Clock) -> None:
    line = WaitingLine(10, 1000, clock)
    entries = [an_entry(number) for number in range(4)]
    for number in (1, 3, 2, 0):
        line.put(entries[number])
    line.remove(entries[1])
    order = []
    while (head := line.head()) is not None:
        order.append(head.number)
        line.remove(head)
    assert order == [0, 2, 3]
    assert (len(line), line.slots) == (0, 0)


def test_one_that_comes_back_is_where_it_was(clock: Clock) -> None:
    line = WaitingLine(10, 1000, clock)
    entries = [an_entry(number) for number in range(3)]
    for entry in entries:
        line.put(entry)
    line.remove(entries[0])
    assert line.head() is entries[1]
    line.put(entries[0])
    assert line.head() is entries[0]
    line.remove(entries[0])
    line.remove(entries[0])
    assert line.slots == 20


def test_the_expired_are_found_anywhere_in_line(clock: Clock) -> None:
    line = WaitingLine(10, 1000, clock)
    entries = [an_entry(0), an_entry(1, deadline=5.0), an_entry(2)]
    for entry in entries:
        line.put(entry)
    assert line.expired() == []
    clock.now = 5.0
    assert line.expired() == [entries[1]]


def test_whoever_is_too_many_is_sent_away(clock: Clock) -> None:
    line = WaitingLine(2, 25, clock)
    for number in range(2):
        line.put(an_entry(number))
        line.judge(an_entry(number), 0.0)
    late = an_entry(2)
    line.put(late)
    with pytest.raises(OverloadedError) as caught:
        line.judge(late, 0.0)
    assert caught.value.retry_after_s == UNKNOWN_RETRY_S
    assert (len(line), line.slots) == (2, 20)


def moving_line(clock: Clock, slots_per_second: int, max_requests: int) -> WaitingLine:
    """A line in which somebody has waited for ten seconds."""
    line = WaitingLine(max_requests, 10**6, clock)
    line.put(an_entry(-1, 1))
    for _ in range(10):
        clock.now += 1.0
        line.rate.release(slots_per_second)
    return line


def test_the_longer_the_line_the_longer_the_delay(clock: Clock) -> None:
    delays = []
    for length in (10, 40, 160, 100_000 // 100):
        line = moving_line(clock, 20, length)
        for number in range(length):
            line.put(an_entry(number))
        late = an_entry(10**6)
        line.put(late)
        with pytest.raises(OverloadedError) as caught:
            line.judge(late, 0.0)
        delays.append(caught.value.retry_after_s)
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx((1 + 10 * 11) / 20)
    assert delays[-1] == RETRY_RANGE_S[1]


def test_a_deadline_that_the_line_would_miss_is_refused_at_once(clock: Clock) -> None:
    line = moving_line(clock, 20, 100)
    for number in range(20):
        line.put(an_entry(number))  # 10 s of work
    for timeout_s, iteration_s, fits in ((11.0, 0.1, True), (10.5, 0.1, False), (11.0, 1.0, False)):
        late = an_entry(99, deadline=clock.now + timeout_s)
        line.put(late)
        if fits:
            line.judge(late, iteration_s)
        else:
            with pytest.raises(OverloadedError, match="deadline"):
                line.judge(late, iteration_s)
        line.remove(late)


def test_nothing_is_refused_on_a_guess(clock: Clock) -> None:
    line = WaitingLine(100, 10**6, clock)
    line.put(an_entry(0, 10_000))
    clock.now += 5.0
    line.rate.release(1)
    late = an_entry(1, deadline=clock.now + 0.5)
    line.put(late)
    line.judge(late, 0.1)
    assert late in line


def test_the_rate_leaves_out_time_in_which_nobody_waited(clock: Clock) -> None:
    rate = SlotRate(clock)
    for _ in range(3):
        rate.someone_waits(True)
        for _ in range(2):
            clock.now += 1.0
            rate.release(10)
        rate.someone_waits(False)
        clock.now += 50.0
        rate.release(1000)
    assert rate.per_second() == pytest.approx(10.0)


def test_the_rate_follows_what_is_now(clock: Clock) -> None:
    rate = SlotRate(clock)
    rate.someone_waits(True)
    for slots in [1] * 100 + [50] * 40:
        clock.now += 1.0
        rate.release(slots)
    assert rate.per_second() == pytest.approx(50.0, rel=0.1)


def test_slow_releases_are_seen_too(clock: Clock) -> None:
    rate = SlotRate(clock)
    rate.someone_waits(True)
    for _ in range(4):
        clock.now += 40.0
        rate.release(20)
    assert rate.per_second() == pytest.approx(0.5)


def test_what_was_long_ago_is_forgotten(clock: Clock) -> None:
    rate = SlotRate(clock)
    rate.someone_waits(True)
    for _ in range(5):
        clock.now += 1.0
        rate.release(10)
    rate.someone_waits(False)
    clock.now += FORGET_S + 10
    assert rate.per_second() is None
