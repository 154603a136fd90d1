"""What Serve says of an application that is being deployed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ray.serve.schema import ApplicationStatus

_REPLICAS: Final = "Replica"
_FAILED: Final = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY, ApplicationStatus.NOT_STARTED)


def n_running(deployments: Mapping[str, Any]) -> int:
    """Replicas that have loaded their model."""
    overview = deployments.get(_REPLICAS)
    return 0 if overview is None else int(overview.replica_states.get("RUNNING", 0))


def failure_of(overview: Any) -> str | None:
    """The one line that says why an application cannot start; ``None`` while it may."""
    messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
    for message in messages:
        for line in reversed(message.splitlines()):
            name, _, reason = str(line).strip().partition(": ")
            if name.startswith("orca_core.errors.") and reason:
                return reason
    if overview.status in _FAILED:
        lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
        return lines[-1] if lines else "the application failed to start"
    return None
