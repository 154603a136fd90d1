"""The paged pool."""

from __future__ import annotations

import torch

from orca_core.kv import KVPool, KVShape


def test_the_pool_stores_where_the_slots_say() -> None:
    pool = KVPool(KVShape(2, 1, 4, torch.float32), n_blocks=3, block_size=2, device=torch.device("cpu"))
    k, v = torch.rand(2, 1, 4), torch.rand(2, 1, 4)
    pool.write(1, torch.tensor([5, 0]), k, v)
    assert torch.equal(pool.keys[1][2, 1], k[0])
    assert torch.equal(pool.values[1][0, 0], v[1])
    assert not pool.keys[0].any()


def test_bytes_per_slot_counts_k_and_v_of_all_layers() -> None:
    assert KVShape(30, 3, 64, torch.bfloat16).bytes_per_slot == 23040
