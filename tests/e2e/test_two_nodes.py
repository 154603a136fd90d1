"""A service on the nodes of a Ray cluster, one of which is lost, leaves and joins: no stream is cut or says else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.paced_service import INGRESS, REPLICA, Paced, say
from tests.e2e.ray_nodes import Nodes, paced_cluster
from tests.e2e.traffic import Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(300)]

N_CPUS = 2
N_REPLICAS = 2 * N_CPUS
N_GRPC, N_HTTP = 20, 4
N_STREAMS = N_GRPC + N_HTTP
N_TOKENS = (60, 180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Paced, Nodes]]:
    args = (
        "engine: {device: cpu, n_slots: 65536, max_model_len: 4096, max_batch_size: 32}",
        f"replicas: {{min: {N_REPLICAS}, max: {N_REPLICAS}, num_cpus: 1, load_report_interval_s: 0.5}}",
        "failover: {silence_s: 4}",
        "ingress: {replicas: 1}",
        "limits: {max_waiting_requests: 128}",
        "drain: {timeout_s: 30}",
    )
    # the paths of Ray's sockets must be short: not pytest's folder
    with (
        tempfile.TemporaryDirectory(prefix="orca-") as folder,
        paced_cluster(Path(folder), 25.0, N_CPUS, *args) as running,
    ):
        yield running


def traffic(service: Paced, seed: int) -> Traffic:
    return Traffic(service.server, N_GRPC, N_HTTP, N_TOKENS, seed=seed)


def test_replicas_are_on_both_nodes(cluster: tuple[Paced, Nodes]) -> None:
    service, nodes = cluster
    service.settle(N_REPLICAS)
    head, worker = nodes.started
    assert [len(node.pids(REPLICA)) for node in (head, worker)] == [N_CPUS, N_CPUS]
    assert [len(node.pids(INGRESS)) for node in (head, worker)] == [1, 0]
    with traffic(service, 1) as clients:
        clients.wait_for(2 * N_STREAMS)
    assert not clients.faults()
    assert clients.resumes == 0
    assert len({got.replica for got in clients.done if got.replica}) == N_REPLICAS


def test_a_node_that_is_lost(cluster: tuple[Paced, Nodes]) -> None:
    service, nodes = cluster
    service.settle(N_REPLICAS)
    with traffic(service, 2) as clients:
        clients.wait_for(N_STREAMS // 2)
        nodes.started[-1].lose()
        service.wait_for_replicas(N_REPLICAS - N_CPUS)
        clients.wait_for(N_STREAMS)
        joined = nodes.add("second", N_CPUS)
        back_s = service.wait_for_replicas(N_REPLICAS)
        clients.wait_for(N_STREAMS)
    assert not clients.faults()
    assert clients.resumes > 0
    assert len(joined.pids(REPLICA)) == N_CPUS
    service.settle(N_REPLICAS)
    say("node lost", streams=len(clients.done), resumes=clients.resumes, back_s=back_s)


def test_a_node_that_leaves(cluster: tuple[Paced, Nodes]) -> None:
    """SIGTERM, as Kubernetes ends a pod: it finishes what it has begun, though its replicas find no room elsewhere."""
    service, nodes = cluster
    service.settle(N_REPLICAS)
    with traffic(service, 3) as clients:
        clients.wait_for(N_STREAMS // 2)
        nodes.started[-1].leave()
        service.wait_for_replicas(N_REPLICAS - N_CPUS)
        clients.wait_for(N_STREAMS)
        joined = nodes.add("third", N_CPUS)
        back_s = service.wait_for_replicas(N_REPLICAS)
        clients.wait_for(N_STREAMS)
    assert not clients.faults()
    assert clients.resumes == 0
    assert len(joined.pids(REPLICA)) == N_CPUS
    service.settle(N_REPLICAS)
    say("node leaves", streams=len(clients.done), resumes=clients.resumes, back_s=back_s)
