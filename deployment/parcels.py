"""What ingress and replica say to each other: plain values, cheap to pickle, free of Ray.

One stream runs from a replica to each ingress. Each item of it, a *parcel*, holds an iteration's news for all of that
ingress's requests and says how the replica stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from orca_core.errors import OrcaError
from orca_core.types import GenerationChunk, GenerationRequest, Load, ModelInfo

Word = tuple[str, str, tuple[int, ...]] | tuple[str, GenerationChunk | OrcaError]
"""(request id, text, token ids): most words are no more than that. Otherwise (request id, chunk or error)."""


class Pinned(NamedTuple):
    """Among the arguments of a call through Serve: it goes to that replica or fails at once.

    ``may_have_left``: a replica that Serve has taken out of its set, to be drained, will do as well.
    """

    replica: str
    may_have_left: bool = False


class LineDepth(NamedTuple):
    """What waits in an ingress: demand in slots, and requests."""

    slots: int
    requests: int


NOTHING_WAITS: Final = LineDepth(0, 0)


class Standing(NamedTuple):
    """How a replica stands. ``at``: seconds on the replica's own monotonic clock, to tell the later of two.

    ``n_accepted``: how many requests it had accepted from the ingress that is told; ``load`` knows of all these, so no
    clocks have to be compared to find out what it does not know of.
    """

    load: Load
    at: float
    n_accepted: int
    well: bool = True


class Parcel(NamedTuple):
    """One item from a replica to an ingress. A request whose word ends it gave its slots back before ``standing``."""

    standing: Standing
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself. ``taken_at``: wall-clock seconds. ``well``: whether its engine makes progress."""

    replica: str
    info: ModelInfo
    load: Load
    taken_at: float
    well: bool = True


class Submission(NamedTuple):
    """A request as it goes to a replica. ``client_request_id``: what its client calls it."""

    request: GenerationRequest
    client_request_id: str


class Accepted(NamedTuple):
    """The replica has reserved the request's whole demand. ``number``: its place among all that this ingress sent."""

    number: int


class Rejected(NamedTuple):
    """The replica has no room for the request now, or does not know the link it is to answer on."""

    standing: Standing


class Failed(NamedTuple):
    """The replica could not even say no; ``kind`` names the exception. Of a call, it concerns one request only."""

    kind: str


def pack(chunk: GenerationChunk) -> Word:
    """A chunk as a word."""
    if chunk.finish_reason is None and not chunk.logprobs:
        return chunk.request_id, chunk.text, chunk.token_ids
    return chunk.request_id, chunk


def unpack(word: Word, request_id: str = "") -> GenerationChunk | OrcaError:
    """What a word says. ``request_id``: whose chunk it is, where that goes by another name here; empty = the word's."""
    if len(word) == 3:
        return GenerationChunk(request_id or word[0], word[1], word[2])
    said = word[1]
    return said._replace(request_id=request_id) if request_id and isinstance(said, GenerationChunk) else said
