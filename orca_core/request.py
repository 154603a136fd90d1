"""The mutable state of one generation, with guarded transitions."""

from __future__ import annotations

from enum import Enum

from orca_core.chain import BlockChain
from orca_core.errors import InvariantError
from orca_core.types import GenerationRequest


class RequestState(Enum):
    """Stored lifecycle. Whether a running request is in initiation or increment is derived, never stored."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One generation inside an engine (Orca figure 4: an entry of the request pool).

    Owned by the loop thread. ``arrived_at``, ``deadline``: seconds on the engine's clock. ``token_ids``: prompt and
    output; ``n_computed`` of them have their K and V in the pool, ``n_cached`` of those since before it was admitted.
    The newest output token is never computed yet. ``blocked_since``: when it was first found not to fit, at the head of
    the line; ``n_overtakers``: requests that were admitted before it since then. ``chain``: what ``token_ids`` are
    found by in the prefix cache.

    What is asked for with each token is kept, not worked out: ``request_id``, unique, given by whoever submitted the
    request; ``n_prompt_tokens``; ``n_initial``, of the prompt and of what a resumed request brings along.
    """

    __slots__ = (
        "admitted_at", "arrived_at", "blocked_since", "chain", "deadline", "first_token_at", "n_cached",
        "n_computed", "n_initial", "n_overtakers", "n_prompt_tokens", "request_id", "spec", "state", "token_ids",
    )  # fmt: skip

    def __init__(self, spec: GenerationRequest, arrived_at: float) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.n_prompt_tokens = len(spec.token_ids)
        self.n_initial = self.n_prompt_tokens + len(spec.emitted_ids)
        self.state = RequestState.WAITING
        self.token_ids: list[int] = [*spec.token_ids, *spec.emitted_ids]
        self.chain = BlockChain(self.token_ids)
        self.n_computed = 0
        self.n_cached = 0
        self.arrived_at = arrived_at
        self.deadline = None if spec.timeout_s is None else arrived_at + spec.timeout_s
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.blocked_since: float | None = None
        self.n_overtakers = 0

    @property
    def n_output_tokens(self) -> int:
        """Tokens generated so far, here or, of a resumed request, elsewhere."""
        return len(self.token_ids) - self.n_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, oldest first. A copy."""
        return self.token_ids[self.n_prompt_tokens :]

    @property
    def total_tokens(self) -> int:
        """The demand, in slots: prompt + ``max_new_tokens``."""
        return self.spec.total_tokens

    @property
    def n_uncomputed(self) -> int:
        """Known tokens whose K and V are not in the pool yet: 1 in an increment, more during initiation."""
        return len(self.token_ids) - self.n_computed

    @property
    def in_initiation(self) -> bool:
        """True until the whole prompt is computed (Orca: initiation phase), and what a resumed request brings along."""
        return self.n_computed < self.n_initial

    @property
    def n_cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that did not have to be computed."""
        return min(self.n_cached, self.n_prompt_tokens)

    def block(self, now: float) -> None:
        """It is the oldest waiting request and does not fit. Only the first time counts."""
        if self.blocked_since is None:
            self.blocked_since = now

    def admit(self, now: float, n_cached: int = 0) -> None:
        """WAITING -> RUNNING, when its slots were reserved; the first ``n_cached`` tokens are computed already."""
        if not 0 <= n_cached < len(self.token_ids):
            raise InvariantError(f"request {self.request_id}: {n_cached} tokens cached of {len(self.token_ids)}")
        self._move(RequestState.WAITING, RequestState.RUNNING)
        self.admitted_at = now
        self.n_cached = self.n_computed = n_cached

    def advance(self, n_tokens: int) -> None:
        """``n_tokens`` more of the known tokens now have their K and V in the pool."""
        n_computed = self.n_computed + n_tokens
        if self.state is not RequestState.RUNNING or not self.n_computed < n_computed <= len(self.token_ids):
            raise InvariantError(f"request {self.request_id} advanced by {n_tokens} in {self.state.value}")
        self.n_computed = n_computed

    def append(self, token_id: int, now: float) -> None:
        """Add the token sampled from the last computed position."""
        ids = self.token_ids
        if self.state is not RequestState.RUNNING or self.n_computed != len(ids):
            raise InvariantError(f"request {self.request_id} got a token while {self.n_uncomputed} are uncomputed")
        if len(ids) - self.n_prompt_tokens >= self.spec.max_new_tokens:
            raise InvariantError(f"request {self.request_id} would outgrow its reservation")
        ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now

    def finish(self) -> None:
        """Anything but FINISHED -> FINISHED."""
        if self.state is RequestState.FINISHED:
            raise InvariantError(f"request {self.request_id} finished twice")
        self.state = RequestState.FINISHED

    def _move(self, old: RequestState, new: RequestState) -> None:
        if self.state is not old:
            raise InvariantError(f"request {self.request_id} is {self.state.value}, not {old.value}")
        self.state = new

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.n_prompt_tokens}, "
            f"output={self.n_output_tokens}, computed={self.n_computed})"
        )
