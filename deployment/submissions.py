"""Many requests to one replica in one call: what a call through Serve costs is paid once for all of an instant.

A call costs milliseconds of CPU on both sides, whatever it carries; a burst of requests would spend more on being sent
than on its first tokens. Free of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Final, NamedTuple

from deployment.parcels import Accepted, Failed, Rejected, Submission
from orca_core.errors import OrcaError

MAX_CALLS: Final = 2
"""Calls that are on their way over one link; what comes meanwhile waits for one of them to be answered, and goes in the
next. Two, so that a lone request never waits for the answer of another one."""

MAX_REQUESTS: Final = 64
"""In one call: a replica takes them in between two iterations of its event loop."""

Answer = Accepted | Rejected | OrcaError | Failed
Send = Callable[[str, str, tuple[Submission, ...]], Awaitable[Sequence[Answer]]]


class LinkKey(NamedTuple):
    """Whom a call is for, and the link on which the replica is to answer its requests."""

    replica: str
    link_id: str


class _Post(NamedTuple):
    """A request and who waits for what becomes of it."""

    submission: Submission
    answer: asyncio.Future[Accepted | Rejected]


class Submissions:
    """``send(replica, link_id, submissions)`` carries one call and returns an answer for each, in the same order.

    What one request comes to is nobody else's business: an error of its own, or that who asked has given up. A call of
    which all have given up is cancelled. Lives on one event loop.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[LinkKey, list[_Post]] = {}
        self._n_calls: dict[LinkKey, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps no reference

    async def submit(self, replica: str, link_id: str, submission: Submission) -> Accepted | Rejected:
        """What the replica says of one request. Raises its own error, or whatever becomes of the call."""
        key, loop = LinkKey(replica, link_id), asyncio.get_running_loop()
        post = _Post(submission, loop.create_future())
        posts = self._waiting.setdefault(key, [])
        posts.append(post)
        if len(posts) == 1:
            loop.call_soon(self._go, key, context=Context())
        return await post.answer

    def _go(self, key: LinkKey) -> None:
        """Send what waits, unless enough is on its way already: then its end sends it."""
        while key in self._waiting and self._n_calls.get(key, 0) < MAX_CALLS:
            posts = [post for post in self._waiting.pop(key) if not post.answer.done()]
            if len(posts) > MAX_REQUESTS:
                self._waiting[key] = posts[MAX_REQUESTS:]
            if posts:
                self._begin(key, posts[:MAX_REQUESTS])

    def _begin(self, key: LinkKey, posts: list[_Post]) -> None:
        self._n_calls[key] = self._n_calls.get(key, 0) + 1
        # a context of its own: what Serve ties to a client's request must not be tied to this
        task = asyncio.get_running_loop().create_task(self._carry(key, posts), context=Context())
        self._tasks.add(task)
        _cancel_when_all_are_done(task, posts)
        task.add_done_callback(lambda task: self._ended(key, task))

    def _ended(self, key: LinkKey, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._n_calls[key] -= 1
        if not self._n_calls[key]:
            del self._n_calls[key]
        self._go(key)

    async def _carry(self, key: LinkKey, posts: list[_Post]) -> None:
        try:
            answers = await self._send(key.replica, key.link_id, tuple(post.submission for post in posts))
            for post, answer in zip(posts, answers, strict=True):
                _tell(post, answer)
        except asyncio.CancelledError:
            for post in posts:
                post.answer.cancel()
            raise
        except Exception as error:
            for post in posts:
                if not post.answer.done():
                    post.answer.set_exception(error)


def _tell(post: _Post, answer: Answer) -> None:
    if post.answer.done():
        return
    if isinstance(answer, Failed):
        post.answer.set_exception(RuntimeError(answer.kind))
    elif isinstance(answer, OrcaError):
        post.answer.set_exception(answer)
    else:
        post.answer.set_result(answer)


def _cancel_when_all_are_done(task: asyncio.Task[None], posts: Sequence[_Post]) -> None:
    """Nobody waits for the call any more: it is not to hold up those that come after it."""
    left = len(posts)

    def one_is_done(_: asyncio.Future[Accepted | Rejected]) -> None:
        nonlocal left
        left -= 1
        if not left:
            task.cancel()

    for post in posts:
        post.answer.add_done_callback(one_is_done)
