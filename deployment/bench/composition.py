"""Which request was where in the batch, iteration by iteration: what the picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orca_core.iterations import Iteration


@dataclass(slots=True)
class Stay:
    """One request's stay in the batch. ``place``: the lowest that was free when it came, from 0.

    Seconds on the engine's clock. ``initiated_s``: the end of the last iteration with rows of its prompt.
    """

    request_id: str
    place: int
    first_iteration: int
    last_iteration: int
    started_s: float
    initiated_s: float
    ended_s: float


@dataclass(slots=True)
class Composition:
    """Stays in the order in which they began, and the iterations at which a request-level batch would have begun."""

    stays: list[Stay] = field(default_factory=list)
    batch_ends_s: list[float] = field(default_factory=list)

    @property
    def n_places(self) -> int:
        """Places that were ever taken."""
        return max(stay.place for stay in self.stays) + 1


def compose(iterations: Sequence[Iteration]) -> Composition:
    """Places are ours: an engine has none, a request's rows lie wherever the flat batch puts them."""
    last_seen = {part.request_id: index for index, it in enumerate(iterations) for part in it.parts}
    stays: dict[str, Stay] = {}
    taken: dict[int, str] = {}
    composition = Composition()
    for index, iteration in enumerate(iterations):
        for part in iteration.parts:
            stay = stays.get(part.request_id)
            if stay is None:
                place = next(place for place in range(len(taken) + 1) if place not in taken)
                taken[place] = part.request_id
                stay = Stay(part.request_id, place, index, index, iteration.started_s, 0.0, 0.0)
                stays[part.request_id] = stay
                composition.stays.append(stay)
            stay.last_iteration, stay.ended_s = index, iteration.ended_s
            if part.initiation:
                stay.initiated_s = iteration.ended_s
        for place, request_id in list(taken.items()):
            if last_seen[request_id] == index:
                del taken[place]
        if not taken:
            composition.batch_ends_s.append(iteration.ended_s)
    return composition


def returned_s(composition: Composition) -> dict[str, float]:
    """When each request's batch had ended: what the client of a request-level engine waits for. Seconds, by id."""
    return {
        stay.request_id: next(end for end in composition.batch_ends_s if end >= stay.ended_s)
        for stay in composition.stays
    }
