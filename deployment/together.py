"""Whether the choices of one request can ever run together: what never can must not be told to try again."""

from __future__ import annotations

from collections.abc import Sequence

from deployment.config_sections import LimitsSection
from deployment.parcels import ReplicaReport
from deployment.quota import LIMIT
from orca_core.errors import InvalidRequestError


def check_together(
    demands: Sequence[int],
    reports: Sequence[ReplicaReport],
    limits: LimitsSection,
    max_batch_size: int,
    share: int | None,
) -> None:
    """Choices begin in one instant: each runs at once, or waits in line. Raises ``InvalidRequestError``.

    ``demands``: slots of each. ``max_batch_size``: requests that one replica runs together. ``share``: slots that one
    caller may hold; ``None`` = all.
    """
    demand, n_choices = sum(demands), len(demands)
    n_slots = sum(report.load.n_slots for report in reports)
    room = n_slots + limits.max_waiting_slots
    if demand > room:
        _refuse(f"{n_choices} choices need {demand} slots together, and all replicas with the line have {room}")
    if share is not None and demand > share:
        _refuse(f"{n_choices} choices need {demand} slots together, and {LIMIT} is {share}")
    places = len(reports) * max_batch_size + limits.max_waiting_requests
    if n_choices > places:
        _refuse(f"{n_choices} choices, and all replicas with the line have {places} places")
    n_at_once = max(0, n_choices - limits.max_waiting_requests)  # at best the largest wait
    at_once = sum(sorted(demands)[:n_at_once])
    if at_once > n_slots:
        _refuse(f"{n_at_once} of {n_choices} choices need {at_once} slots at once, and all replicas have {n_slots}")


def _refuse(reason: str) -> None:
    raise InvalidRequestError("n", reason)
