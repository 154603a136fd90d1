"""The text of one request as it grows, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from orca_core.errors import InvalidRequestError, InvariantError
from orca_core.params import SamplingParams
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason

_new: Final = tuple.__new__  # makes a named tuple without a call through Python, once for each token


class StreamUpdate(NamedTuple):
    """What one token added. ``finish`` is STOP where it ended the request; ``stop``: the string or stop id that did.

    ``stop`` is ``None`` for an eos id.
    """

    text: str
    finish: FinishReason | None = None
    stop: str | None = None

    def __repr__(self) -> str:  # a repr ends up in logs: it must not hold an answer
        return f"StreamUpdate(finish={self.finish})"


class TextStream:
    """Incremental detokenisation of one request, with its stop strings and stop ids.

    All state follows from the tokens pushed so far: pushing the same tokens into a new stream restores it. An eos or
    stop id adds no text. A stop string counts where it is complete, in the text of the whole answer, with the token
    number ``min_new_tokens`` or a later one; it may have begun before. What is held back is the beginning of a stop
    string, and bytes that are no character yet (see ``orca_core.detokenizer``).
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._decoder = tokenizer.decoder()
        self._sampling = sampling
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = self._eos_ids | self._stop_ids
        self._n_tokens = 0
        self._held = ""  # the end of the text that may be the beginning of a stop string
        self._ended = False

    def push(self, token_id: int) -> StreamUpdate:
        """Take in one sampled token; it counts as generated whatever it is. Raises ``InvariantError`` after the end."""
        if self._ended:
            raise InvariantError("a token was pushed into a text stream that has ended")
        self._n_tokens += 1
        if token_id in self._end_ids and self._may_stop:
            return self._end_with(token_id)
        text = self._decoder.push(token_id)
        return self._take(text, is_last=False) if self._sampling.stop else _new(StreamUpdate, (text, None, None))

    def _end_with(self, token_id: int) -> StreamUpdate:
        """An eos or stop id."""
        last = self._take(self._decoder.finish(), is_last=True)
        self._ended = True
        if last.finish is not None:
            return last
        return StreamUpdate(last.text, FinishReason.STOP, str(token_id) if token_id in self._stop_ids else None)

    def finish(self) -> StreamUpdate:
        """No more tokens: what was held back. Bytes that only now are settled may complete a stop string; then that is
        how the request ends. Empty after an end.
        """
        if self._ended:
            return StreamUpdate("")
        self._ended = True
        return self._take(self._decoder.finish(), is_last=True)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take in tokens whose text was given out elsewhere. Raises ``InvalidRequestError`` if they end the answer."""
        for token_id in token_ids:
            if self.push(token_id).finish is not None:
                raise InvalidRequestError("emitted_ids", "hold the end of the answer already")

    @property
    def _may_stop(self) -> bool:
        return self._n_tokens >= self._sampling.min_new_tokens

    def _take(self, new: str, *, is_last: bool) -> StreamUpdate:
        """Add settled text, and give out what cannot be the beginning of a stop string."""
        stops = self._sampling.stop
        if not stops:
            return StreamUpdate(new)
        text, n_old = self._held + new, len(self._held)
        match = find_stop(text, stops, n_old) if self._may_stop else None
        if match is not None:
            start, stop = match
            self._held, self._ended = "", True
            end = start + len(stop) if self._sampling.include_stop_text else start
            return StreamUpdate(text[:end], FinishReason.STOP, stop)
        n_held = 0 if is_last else longest_partial_stop(text, stops)
        self._held = text[len(text) - n_held :]
        return StreamUpdate(text[: len(text) - n_held])


def find_stop(text: str, stops: Sequence[str], n_old: int = 0) -> tuple[int, str] | None:
    """(start, stop string) of the match that is complete first; of several that end together, the longest.

    By where a match ends, not where it starts: so the answer does not depend on how the text was cut into tokens.
    Matches that end in the first ``n_old`` characters don't count: they have been looked at.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, n_old - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def longest_partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
    best = 0
    for stop in stops:
        at = len(text) - min(len(stop) - 1, len(text))
        while len(text) - at > best:
            # only where the first character is can the string begin
            at = text.find(stop[0], at)
            if at < 0 or len(text) - at <= best:
                break
            if stop.startswith(text[at:]):
                best = len(text) - at
                break
            at += 1
    return best
