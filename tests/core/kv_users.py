"""Small ledgers and users of them."""

from __future__ import annotations

from orca_core.chain import BlockChain
from orca_core.kv import KVManager


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
