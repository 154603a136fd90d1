"""The autoscaling policy as Ray Serve runs it: in the controller, many times a second, with what the replicas reported.

Serve pickles this module by value into the controller; what it imports must be importable there. Serve carries the
state from call to call in the policy's own dict, which begins empty whenever the application is deployed or the
controller restarts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from ray.serve.config import AutoscalingContext

from deployment.scaling_board import Note, RayStore, ScalingBoard, Store
from deployment.scaling_decision import Facts, Settings, State, decide
from deployment.scaling_reports import Report, report_from_stats

_log = logging.getLogger("ray.serve")  # the one that the controller writes to its file

STATE: Final = "orca"
DECIDED_AT: Final = "orca_decided_at"
CHANGE: Final = "orca_change"
TARGET: Final = "orca_target"


class QueueDepthPolicy:
    """Replicas follow queued and reserved slots. Called with Serve's context, answers with a number and a state.

    ``interval_s``: seconds between decisions; in between the answer is the present target. ``settings``: the fields of
    ``scaling_decision.Settings``. All are plain numbers: Serve wants them as JSON. ``clock``: seconds, monotonic;
    ``wall_clock``: the same, comparable across processes. ``store``: where decisions are written down.
    """

    def __init__(
        self,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        store: Store | None = None,
        **settings: Any,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._store = store or RayStore()
        self._board: ScalingBoard | None = None
        self._settings = Settings(**settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Serve's policy protocol."""
        now, kept = self._clock(), dict(context.policy_state)
        if now - kept.get(DECIDED_AT, float("-inf")) < self._interval_s:
            return context.target_num_replicas, kept
        decision = decide(now, kept.get(STATE, State()), facts_of(context), self._settings)
        wall = self._wall_clock()
        if decision.replicas != context.target_num_replicas:
            _log.info("autoscaling %s: %s", context.deployment_name, decision.reason)
            kept[CHANGE] = decision.reason, wall
        elif (before := kept.get(TARGET, decision.replicas)) != decision.replicas:
            # Serve itself wakes a deployment that has no replica, without asking a policy
            reason = f"{before} -> {decision.replicas} replicas: somebody waited for the first"
            _log.info("autoscaling %s: %s", context.deployment_name, reason)
            kept[CHANGE] = reason, wall
        n_running = len(context.running_replicas)
        note = Note(decision.replicas, n_running, decision.reason, wall, *kept.get(CHANGE, ()))
        if self._board is None:
            self._board = ScalingBoard(self._store, context.app_name or "")
        self._board.write(note)
        return decision.replicas, {**kept, STATE: decision.state, DECIDED_AT: now, TARGET: decision.replicas}


def facts_of(context: AutoscalingContext) -> Facts:
    """What Serve's context says, in our words.

    The raw series are read, not Serve's averages: a decision needs what is, and when it was. Requests queued at the
    handles count only while no replica runs: that is the one thing they wait for there.
    """
    unplaced = 0 if context.running_replicas else round(context.total_queued_requests or 0)
    return Facts(
        target=context.target_num_replicas,
        min_replicas=context.capacity_adjusted_min_replicas,
        max_replicas=context.capacity_adjusted_max_replicas,
        reports=tuple(_latest(context, replica) for replica in context.running_replicas),
        unplaced_requests=unplaced,
    )


def _latest(context: AutoscalingContext, replica: Any) -> Report:
    """The last of a replica's reports; one that has made none is empty."""
    last = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        series = by_replica.get(replica)
        if series:
            last[name] = series[-1]
    newest = max((point.timestamp for point in last.values()), default=0.0)
    # a number that the replica no longer reports stays in the series for a while
    stats = {name: point.value for name, point in last.items() if point.timestamp == newest}
    return report_from_stats(replica.unique_id, newest, stats)
