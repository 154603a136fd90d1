"""What holds for the dispatcher of an ingress. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from deployment.config_sections import ColdRequests


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """``interval_s``: seconds between two polls of the replicas, and between two looks at the links.

    ``silence_s``: seconds without a sign of life after which a replica is lost. ``max_waiting_requests``,
    ``max_waiting_slots``: bounds of the line. ``overtaking_s``, ``max_overtakers``: while the head of the line fits
    nowhere, those behind it that do may be sent, for so long and so many at most; 0 = nobody. ``from_zero``: what
    becomes of a request when the service has scaled to zero; ``None`` = it never does. ``coalesce_s``: see ``Pace``.
    """

    interval_s: float
    silence_s: float
    max_waiting_requests: int
    max_waiting_slots: int
    overtaking_s: float = 0.0
    max_overtakers: int = 0
    from_zero: ColdRequests | None = None
    coalesce_s: float = 0.0
