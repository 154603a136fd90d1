"""Blocks that are shared by content: what is found, what it costs, who carries it, when it goes."""

from __future__ import annotations

import pytest

from orca_core.chain import BlockChain
from orca_core.errors import InvariantError
from orca_core.kv.blocks import BlockStore
from tests.core.kv_users import TEN, compute, manager

# ---- what is found


def test_a_beginning_that_was_computed_is_found_while_its_holder_runs_and_after() -> None:
    kv = manager()
    assert compute(kv, "a", TEN) == 0
    assert compute(kv, "b", [*TEN[:8], 90, 91]) == 8
    assert kv.blocks("a")[:2] == kv.blocks("b")[:2]
    assert kv.blocks("a")[2] != kv.blocks("b")[2]
    kv.release("a")
    kv.release("b")
    kv.check_integrity(idle=True)
    assert kv.cached_slots == 8
    assert compute(kv, "c", TEN) == 8


def test_the_last_token_is_always_computed() -> None:
    kv = manager()
    compute(kv, "a", TEN[:8])
    assert compute(kv, "b", TEN[:8]) == 4
    assert compute(kv, "c", TEN[:9]) == 8


def test_equal_tokens_in_another_place_are_something_else() -> None:
    kv = manager()
    compute(kv, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert compute(kv, "b", [5, 6, 7, 8, 9]) == 0
    assert compute(kv, "c", [1, 2, 3, 4, 1, 2, 3, 4, 9]) == 4


def test_nothing_is_found_before_it_is_published_nor_when_off() -> None:
    kv = manager()
    kv.reserve("a", 10, BlockChain(TEN))
    kv.extend("a", 10)
    assert compute(kv, "b", TEN) == 0
    off = manager(prefix_cache=False)
    compute(off, "a", TEN)
    assert compute(off, "b", TEN) == 0
    assert off.cached_slots == 0


def test_of_two_that_computed_the_same_at_once_one_keeps_its_own() -> None:
    kv = manager()
    for name in "ab":
        kv.reserve(name, 10, BlockChain(TEN))
        kv.extend(name, 10)
    kv.publish("a")
    kv.publish("b")
    kv.check_integrity()
    assert kv.reserved_slots == 20
    assert compute(kv, "c", TEN) == 8
    assert kv.blocks("c")[:2] == kv.blocks("a")[:2]


def test_what_is_generated_is_found_too() -> None:
    """The next turn of a chat begins with the prompt and the answer of the last."""
    kv = manager()
    tokens = TEN[:3]
    kv.reserve("a", 12, BlockChain(tokens))
    kv.extend("a", 3)
    for token in (50, 51, 52, 53, 54, 55):
        kv.publish("a")
        tokens.append(token)
        kv.extend("a", 1)
    kv.publish("a")
    kv.release("a")
    assert compute(kv, "b", [0, 1, 2, 50, 51, 52, 53, 54, 99]) == 8


def test_what_is_distrusted_is_not_found_again_and_its_other_holders_keep_it() -> None:
    kv = manager()
    compute(kv, "a", TEN)
    compute(kv, "b", TEN, 12)
    kv.distrust("a")
    kv.distrust("unknown")
    kv.release("a")
    kv.check_integrity()
    assert compute(kv, "c", TEN) == 0
    kv.extend("b", 2)
    kv.release("b")
    kv.check_integrity()
    assert kv.cached_slots == 0  # of the four, two are c's now and two came back blank


# ---- what it costs


def test_a_shared_block_counts_once_and_whoever_remains_carries_it() -> None:
    kv = manager()
    compute(kv, "a", TEN, 20)
    compute(kv, "b", TEN, 20)
    assert (kv.reserved_slots, kv.used_slots) == (20 + 12, 10 + 2)
    kv.release("a")  # who brought them leaves first
    kv.check_integrity()
    assert (kv.reserved_slots, kv.used_slots) == (20, 10)
    kv.release("b")
    kv.check_integrity(idle=True)


def test_what_others_hold_makes_room_and_what_is_merely_cached_does_not() -> None:
    kv = manager(n_slots=24)
    compute(kv, "a", TEN, 12)
    assert not kv.reserve("b", 21, BlockChain(TEN))
    assert kv.reserve("b", 20, BlockChain(TEN))  # 12 + 20 - 8
    kv.release("a")
    kv.release("b")
    assert kv.cached_slots == 8
    assert not kv.reserve("c", 25, BlockChain(TEN))
    assert kv.reserve("c", 24, BlockChain(TEN))
    assert kv.reserved_slots == 24
    kv.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    kv = manager(n_slots=24)
    compute(kv, "a", TEN, 20)
    before = (kv.reserved_slots, kv.used_slots, kv.n_holders, kv.cached_slots)
    assert not kv.reserve("b", 20, BlockChain(TEN))
    assert (kv.reserved_slots, kv.used_slots, kv.n_holders, kv.cached_slots) == before
    kv.check_integrity()


# ---- when it goes


def test_the_longest_unused_goes_first_and_of_a_sequence_its_end() -> None:
    kv = manager(n_slots=16, max_batch_size=1)  # 5 blocks
    old, new = [1] * 9, [2] * 9
    for tokens in (old, new):
        compute(kv, "x", tokens)
        kv.release("x")
    assert kv.cached_slots == 16
    compute(kv, "y", [3] * 5)  # takes the one blank block, and one of the old sequence's
    kv.release("y")
    assert compute(kv, "z", new) == 8
    kv.release("z")
    assert compute(kv, "z", old) == 4


def test_cached_blocks_are_free_blocks() -> None:
    kv = manager(n_slots=16, max_batch_size=1)
    for value in range(20):
        assert compute(kv, "x", [value] * 16) == 0
        kv.release("x")
        kv.check_integrity(idle=True)
    assert kv.cached_slots == 20  # every block there is


def test_no_block_is_left_is_a_bug() -> None:
    store = BlockStore(1)
    store.take()
    with pytest.raises(InvariantError, match="in use"):
        store.take()


# ---- digests


def test_a_digest_covers_every_token_before_it_and_nothing_else() -> None:
    chain = BlockChain(TEN)
    assert chain.digest(1, 4) == BlockChain(TEN[:8]).digest(1, 4) != chain.digest(0, 4)
    for i in range(8):
        changed = [*TEN[:i], 1000, *TEN[i + 1 :]]
        assert BlockChain(changed).digest(1, 4) != chain.digest(1, 4)
    with pytest.raises(InvariantError, match="block 2"):
        chain.digest(2, 4)
    with pytest.raises(InvariantError):
        chain.digest(0, 2)


def test_ids_of_any_size_have_a_digest() -> None:
    assert BlockChain([2**31, 0]).digest(0, 2) != BlockChain([0, 2**31]).digest(0, 2)
