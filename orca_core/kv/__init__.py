"""The key/value memory of one engine: a ledger of slots, the blocks behind it, and the paged pool they lie in.

A *slot* is room for one token's K and V in all layers. The ledger promises slots to requests at admission (Orca,
Algorithm 1: ``n_rsrv``); *blocks* of ``block_size`` slots are taken against that promise as tokens come. Full blocks
are shared between requests that begin with the same tokens.
"""

from __future__ import annotations

from orca_core.kv.manager import KVManager
from orca_core.kv.pool import KVPool, KVShape

__all__ = ["KVManager", "KVPool", "KVShape"]
