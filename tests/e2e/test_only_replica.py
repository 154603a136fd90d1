"""A service of one replica that hangs: the next one needs its CPUs, so it must not keep them. Field case F1."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.paced_service import REPLICA, Paced, paced_service, say, wait_until
from tests.e2e.traffic import Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(600)]

DRAIN_S = 240.0
"""What the next replica would have to wait for if this one were only asked to exit."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Paced]:
    args = (
        "engine: {device: cpu, n_slots: 65536, max_model_len: 4096, max_batch_size: 32}",
        # Ray has one CPU more than the application wants: too few for a second replica
        "replicas: {min: 1, max: 1, num_cpus: 2, load_report_interval_s: 0.5}",
        "failover: {silence_s: 4, max_resumes: 5}",
        f"drain: {{timeout_s: {DRAIN_S:g}}}",
    )
    with paced_service(tmp_path, 25.0, *args) as running:
        yield running


def test_the_only_replica_hangs(service: Paced) -> None:
    with Traffic(service.server, 12, 4, (60, 180), seed=11) as clients:
        clients.wait_for(8)
        frozen = service.signal_one(REPLICA, signal.SIGSTOP)
        began = time.monotonic()
        n_before = len(clients.done)
        clients.wait_for(16, DRAIN_S)  # all that were open
        took_s = time.monotonic() - began
        wait_until("the one that hangs is gone", lambda: not _is_there(frozen))
    assert not clients.faults()
    assert clients.resumes > 0
    assert took_s < DRAIN_S, "it waited for the drain"
    say("the only replica hangs", took_s=took_s, streams=len(clients.done) - n_before)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
