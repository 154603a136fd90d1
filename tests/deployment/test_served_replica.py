"""What a replica takes of its machine: threads and memory."""

from __future__ import annotations

import os

import pytest

from deployment.served_replica import share_of_node, use_threads


def test_thread_pools_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    use_threads(None)
    assert os.environ["OMP_NUM_THREADS"] == "8"
    use_threads(1)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("mine", "there", "share"), [(1.0, 4.0, 0.25), (8.0, 4.0, 1.0), (0.0, 4.0, 1.0), (1.0, 0.0, 1.0)]
)
def test_a_replica_counts_on_its_cpus_part_of_the_ram(
    monkeypatch: pytest.MonkeyPatch, mine: float, there: float, share: float
) -> None:
    import ray

    class Context:
        def get_assigned_resources(self) -> dict[str, float]:
            return {"CPU": mine} if mine else {}

        def get_node_id(self) -> str:
            return "here"

    nodes = [{"NodeID": "other", "Resources": {"CPU": 99.0}}, {"NodeID": "here", "Resources": {"CPU": there}}]
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert share_of_node() == share
