"""The ledger with shared blocks: what the audit sees, and whatever is asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_core.chain import BlockChain
from orca_core.errors import InvariantError
from orca_core.kv import KVManager
from tests.core.kv_users import TEN, compute, manager


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
