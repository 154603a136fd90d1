"""The slot ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_core.errors import InvariantError
from orca_core.kv import KVManager


def test_a_demand_of_exactly_all_slots_fits_and_one_more_does_not() -> None:
    kv = KVManager(n_slots=100, block_size=16, max_batch_size=2)
    assert not kv.reserve("a", 101)
    assert kv.reserved_slots == 0
    assert kv.reserve("a", 100)
    assert not kv.reserve("b", 1)
    kv.check_integrity()


def test_rounding_to_blocks_never_makes_an_admitted_request_fail() -> None:
    kv = KVManager(n_slots=8, block_size=16, max_batch_size=8)
    for name in "abcdefgh":
        assert kv.reserve(name, 1)
        kv.extend(name, 1)  # eight blocks in use for eight slots
    kv.check_integrity()
    assert kv.used_slots == kv.reserved_slots == 8


def test_never_more_holders_than_the_batch_size() -> None:
    kv = KVManager(n_slots=100, block_size=4, max_batch_size=1)
    assert kv.reserve("a", 1)
    assert not kv.reserve("b", 1)


def test_slots_are_contiguous_within_a_block_and_follow_the_block_table() -> None:
    kv = KVManager(n_slots=32, block_size=4, max_batch_size=2)
    kv.reserve("a", 10)
    kv.reserve("b", 4)
    first, other, second = kv.extend("a", 3), kv.extend("b", 4), kv.extend("a", 7)
    table = kv.blocks("a")
    assert first + second == [table[i // 4] * 4 + i % 4 for i in range(10)]
    assert not set(first + second) & set(other)


def test_nobody_takes_more_than_reserved() -> None:
    kv = KVManager(n_slots=32, block_size=4, max_batch_size=2)
    kv.reserve("a", 5)
    kv.extend("a", 5)
    with pytest.raises(InvariantError, match="6 of 5"):
        kv.extend("a", 1)


def test_reserving_twice_is_a_bug_and_releasing_twice_is_not() -> None:
    kv = KVManager(n_slots=32, block_size=4, max_batch_size=2)
    kv.reserve("a", 5)
    with pytest.raises(InvariantError):
        kv.reserve("a", 5)
    kv.release("a")
    kv.release("a")
    kv.check_integrity(idle=True)


def test_the_audit_sees_a_leak() -> None:
    kv = KVManager(n_slots=32, block_size=4, max_batch_size=2)
    kv.reserve("a", 5)
    kv.check_integrity()
    with pytest.raises(InvariantError, match="idle"):
        kv.check_integrity(idle=True)
    kv._n_reserved += 1
    with pytest.raises(InvariantError, match="books"):
        kv.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 8)), max_size=120))
def test_the_books_balance_whatever_is_asked(actions: list[tuple[int, int, int]]) -> None:
    kv = KVManager(n_slots=64, block_size=8, max_batch_size=4)
    left: dict[str, int] = {}
    for who, size, step in actions:
        name = str(who)
        if name not in left:
            if kv.reserve(name, size):
                left[name] = size
        elif left[name] >= step:
            kv.extend(name, step)
            left[name] -= step
        else:
            kv.release(name)
            del left[name]
        kv.check_integrity()
    for name in left:
        kv.release(name)
    kv.check_integrity(idle=True)
