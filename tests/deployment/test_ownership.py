"""Of several ``up`` on one cluster, the last one's is what runs."""

from __future__ import annotations

from deployment.cli.ownership import Ownership


class Store(dict[bytes, bytes]):
    def put(self, key: bytes, value: bytes) -> None:
        self[key] = value


class Broken:
    def put(self, key: bytes, value: bytes) -> None:
        raise RuntimeError

    def get(self, key: bytes) -> bytes | None:
        raise RuntimeError


def test_the_last_one_has_it() -> None:
    store = Store()
    first, second, other = Ownership(store, "app"), Ownership(store, "app"), Ownership(store, "other")
    for each in (first, other, second):
        each.take()
    assert [each.is_lost() for each in (first, second, other)] == [True, False, False]


def test_what_did_not_come_up_is_given_back() -> None:
    store = Store()
    first, second, third = (Ownership(store, "app") for _ in range(3))
    first.take()
    second.take()
    second.give_back()
    assert not first.is_lost()
    second.take()
    third.take()
    second.give_back()  # a third has it meanwhile
    assert [first.is_lost(), third.is_lost()] == [True, False]


def test_without_a_store_it_is_ones_own() -> None:
    owner = Ownership(Broken(), "app")
    owner.take()
    owner.give_back()
    assert not owner.is_lost()
