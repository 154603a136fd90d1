"""Blocks that are shared by content: what is found, what it costs, who carries it, when it goes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_core.chain import BlockChain
from orca_core.errors import InvariantError
from orca_core.kv import KVManager
from orca_core.kv.blocks import BlockStore


def manager(n_slots: int = 64, block_size: int = 4, max_batch_size: int = 4, *, prefix_cache: bool = True) -> KVManager:
    return KVManager(n_slots, block_size, max_batch_size, prefix_cache=prefix_cache)


def compute(kv: KVManager, name: str, tokens: list[int], demand: int | None = None) -> int:
    """Admit a request and compute all its tokens; how many were there already."""
    assert kv.reserve(name, demand or len(tokens), BlockChain(tokens))
    n_cached = kv.cached_tokens(name)
    kv.extend(name, len(tokens) - n_cached)
    kv.publish(name)
    kv.check_integrity()
    return n_cached


TEN = list(range(10))

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


# ---- the audit


def audited(wrong: str) -> KVManager:
    """Two holders of shared blocks, something cached, and one thing wrong."""
    kv = manager()
    compute(kv, "gone", [7] * 9)
    kv.release("gone")
    compute(kv, "a", TEN, 12)
    compute(kv, "b", TEN, 12)
    store = kv._store
    shared, cached = kv.blocks("a")[0], next(iter(store._cached))
    if wrong == "one reference too many":
        store._references[shared] += 1
    elif wrong == "a reference without a holder":
        store._references[store._blank.pop()] = 1
    elif wrong == "shared and free":
        store._blank.append(shared)
    elif wrong == "lost":
        store._blank.pop()
    elif wrong == "cached without a digest":
        store.forget(cached)
    elif wrong == "index of a blank block":
        store._block_of[b"x"], store._digest_of[store._blank[0]] = store._blank[0], b"x"
    elif wrong == "index out of step":
        store._block_of[store._digest_of[cached]] = shared
    elif wrong == "counted twice":
        kv._n_reserved += 8
    elif wrong == "used twice":
        kv._n_used += 8
    return kv


@pytest.mark.parametrize(
    "wrong",
    ["one reference too many", "a reference without a holder", "shared and free", "lost", "cached without a digest",
     "index of a blank block", "index out of step", "counted twice", "used twice"],
)  # fmt: skip
def test_the_audit_sees(wrong: str) -> None:
    audited("nothing").check_integrity()
    with pytest.raises(InvariantError):
        audited(wrong).check_integrity()


def test_the_quick_audit_of_an_idle_engine_sees_what_was_left() -> None:
    kv = manager()
    compute(kv, "a", TEN)
    with pytest.raises(InvariantError, match="1 requests hold"):
        kv.check_idle()
    kv.release("a")
    kv.check_idle()
    kv._n_used += 1
    with pytest.raises(InvariantError, match="1 used"):
        kv.check_idle()
    kv._n_used -= 1
    kv._store._blank.pop()
    with pytest.raises(InvariantError, match="blank"):
        kv.check_idle()


# ---- whatever is asked


class Users:
    """Random requests over three texts. ``memory`` is the pool: in each slot, the tokens its K and V stand for."""

    def __init__(self, kv: KVManager, rng: random.Random) -> None:
        self.kv = kv
        self.rng = rng
        self.memory: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.n_asked = 0

    def act(self, action: str) -> None:
        """r: reserve; e: extend; p: publish; d: distrust and release; x: release."""
        if action == "r":
            self.ask()
        elif self.tokens:
            name = self.rng.choice(list(self.tokens))
            if action == "e" and self.left[name]:
                self.take(name, self.rng.randint(1, self.left[name]))
            elif action == "p":
                self.kv.publish(name)
            elif action in "dx":
                self.leave(name, distrust=action == "d")

    def ask(self) -> None:
        self.n_asked += 1
        name, text = f"r{self.n_asked}", self.rng.choice(["abababababab", "abababcdcdcd", "cdcdcdcdcd"])
        ids = [ord(c) for c in text[: self.rng.randint(1, len(text))]]
        ids += [self.rng.randrange(3) for _ in range(self.rng.randrange(5))]
        if self.kv.reserve(name, len(ids), BlockChain(ids)):
            n_cached = self.kv.cached_tokens(name)
            assert n_cached < len(ids)
            self.tokens[name], self.left[name] = ids, len(ids) - n_cached
            self.check(name)

    def take(self, name: str, n: int) -> None:
        for i, slot in enumerate(self.kv.extend(name, n), len(self.tokens[name]) - self.left[name]):
            self.memory[slot] = tuple(self.tokens[name][: i + 1])
        self.left[name] -= n

    def leave(self, name: str, *, distrust: bool = False) -> None:
        if distrust:
            self.kv.distrust(name)
        self.kv.release(name)
        del self.tokens[name], self.left[name]

    def check(self, name: str) -> None:
        """All that is computed of a request is its own."""
        table, size = self.kv.blocks(name), self.kv.block_size
        for i in range(len(self.tokens[name]) - self.left[name]):
            assert self.memory[table[i // size] * size + i % size] == tuple(self.tokens[name][: i + 1])


@settings(max_examples=150, deadline=None)
@given(st.text("rrreeepdx", max_size=60), st.integers(1, 5), st.integers(1, 4), st.integers(8, 40), st.randoms())
def test_promises_are_kept_and_nobody_reads_anothers_tokens(
    actions: str, block_size: int, max_batch_size: int, n_slots: int, rng: random.Random
) -> None:
    kv = manager(n_slots, block_size, max_batch_size)
    users = Users(kv, rng)
    for action in actions:
        users.act(action)
        kv.check_integrity()
        assert kv.reserved_slots <= n_slots
    names = list(users.tokens)
    rng.shuffle(names)
    for name in names:  # every promise is redeemed, in any order
        if users.left[name]:
            users.take(name, users.left[name])
    for name in names:
        users.check(name)
        users.leave(name)
    kv.check_integrity(idle=True)
    assert (kv.reserved_slots, kv.used_slots) == (0, 0)
