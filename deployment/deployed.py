"""What Serve knows of replicas that no ingress can see: those that wait for room, load, or are about to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, cast

from deployment.serving import DeployedReplicas

_log = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 1.0
_LONGEST_MESSAGE: Final = 400
_REPLICAS: Final = "Replica"


class DeployedBoard:
    """Asks Serve, one question at a time: an answer that is late is everybody's who asks meanwhile.

    ``ask``: blocks, and may raise what it likes.
    """

    def __init__(self, ask: Callable[[], DeployedReplicas | None]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[DeployedReplicas | None] | None = None

    async def read(self) -> DeployedReplicas | None:
        """The counts; ``None`` where there are none, or Serve does not answer in time."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(asyncio.to_thread(self._answer), name="deployed replicas")
        done, _ = await asyncio.wait([self._asked], timeout=READ_TIMEOUT_S)
        return self._asked.result() if done else None

    def _answer(self) -> DeployedReplicas | None:
        try:
            return self._ask()
        except Exception as error:  # whatever it is: the rest of the status is known
            _log.warning("Serve does not say how many replicas there are: %s", type(error).__name__)
            return None


def counts_of(states: Mapping[str, int], message: str) -> DeployedReplicas:
    """From Serve's states of replicas, and its message. All but those that start or stop take requests."""
    starting, stopping = states.get("STARTING", 0), states.get("STOPPING", 0)
    running = sum(states.values()) - starting - stopping - states.get("STOPPED", 0)
    said = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return DeployedReplicas(running, starting, stopping, said[:_LONGEST_MESSAGE])


def ask_serve(app_name: str) -> DeployedReplicas | None:
    """Serve's own status of an application's replicas; ``None`` while it has none."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    replicas = None if application is None else application.deployments.get(_REPLICAS)
    if replicas is None:
        return None
    # whose keys are plain text or of a type that equals it, by the way the status came
    return counts_of(cast("Mapping[str, int]", replicas.replica_states), replicas.message)
