"""A replica as Serve constructs it: one Ray actor that owns one engine. ``app.py`` binds it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from deployment.garbage import spare_what_is_loaded
from deployment.metrics import RayRegistry, ReplicaMetrics
from deployment.outlet import ReplicaEngine
from deployment.replica import Replica
from deployment.serve_log import join_serve_log, leave_out_housekeeping
from orca_core.config import EngineConfig


class ServedReplica(Replica):
    """A replica as Serve constructs it: from plain, picklable values, with the engine loaded when it is done."""

    async def __init__(self, engine_config: EngineConfig, heartbeat_s: float) -> None:  # type: ignore[misc]
        from ray import serve

        use_threads(engine_config.threads)
        join_serve_log()
        leave_out_housekeeping()
        name = serve.get_replica_context().replica_id.unique_id
        metrics = ReplicaMetrics(RayRegistry(), name)
        engine = self.make_engine(replace(engine_config, memory_share=share_of_node()), metrics)
        Replica.__init__(self, engine, name, metrics=metrics, heartbeat_s=heartbeat_s)
        await self.start()
        spare_what_is_loaded()

    @staticmethod
    def make_engine(config: EngineConfig, metrics: ReplicaMetrics) -> ReplicaEngine:
        """The engine, not started."""
        from orca_core.engine import Engine  # not before the thread count is set: torch reads it when it is imported

        return Engine(config, on_iteration=metrics.on_iteration)

    def __del__(self) -> None:
        # Serve calls this once the streams have been drained; it may also run on an object whose constructor failed
        engine: Any = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


def share_of_node() -> float:
    """Part of its node that the actor has, above 0 and at most 1: its CPUs of those Ray has there.

    Ray never gives out more CPUs than a node has, so the shares of all actors on it add up to 1 at most, and RAM that
    is divided by them is not promised twice.
    """
    import ray

    context: Any = ray.get_runtime_context()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    mine = float(context.get_assigned_resources().get("CPU", 0.0))
    node_id = context.get_node_id()
    there = next((node["Resources"].get("CPU", 0.0) for node in nodes if node["NodeID"] == node_id), 0.0)
    return min(1.0, mine / there) if mine > 0 and there > 0 else 1.0


def use_threads(threads: int | None) -> None:
    """Limit the thread pools of the numeric libraries of this process to ``threads``; ``None`` leaves them alone."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
