"""A GPU that is full in the middle of an iteration."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import Rigs

pytestmark = pytest.mark.gpu


def test_the_next_iteration_runs_after_one_that_did_not_fit(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs.make()
    a, b = rig.start("a", 8), rig.start("b", 8)
    total = torch.cuda.get_device_properties(rig.decoder.device).total_memory
    real = rig.attention.prepare

    def hungry(batch: object) -> None:
        kept = torch.empty(1 << 28, dtype=torch.uint8, device=rig.decoder.device)
        torch.empty(2 * total, dtype=torch.uint8, device=rig.decoder.device)
        del kept

    monkeypatch.setattr(rig.attention, "prepare", hungry)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        rig.executor.run_iteration(rig.batch([(a, 8)]))
    rig.executor.recover(caught.value)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    monkeypatch.setattr(rig.attention, "prepare", real)
    (token,) = rig.executor.run_iteration(rig.batch([(b, 8)]))
    assert token.ok
