"""The text of one request as it grows, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orca_core.params import SamplingParams
from orca_core.tokenizer import Tokenizer
from orca_core.types import FinishReason


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """What one token added. ``finish`` is STOP where it ended the request; ``stop``: the string or id that did.

    ``stop`` is ``None`` for an eos id.
    """

    text: str
    finish: FinishReason | None = None
    stop: str | None = None


class TextStream:
    """Incremental detokenisation of one request, with its stop strings and stop ids.

    All state follows from the tokens pushed so far: pushing the same tokens into a new stream restores it. Stop strings
    and stop ids are not looked for in the first ``min_new_tokens - 1`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._decoder = tokenizer.decoder()
        self._sampling = sampling
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._n_tokens = 0
        self._held = ""  # the end of the text that may be the beginning of a stop string

    def push(self, token_id: int) -> StreamUpdate:
        """Take in one sampled token."""
        self._n_tokens += 1
        may_stop = self._n_tokens >= self._sampling.min_new_tokens
        if may_stop and (token_id in self._eos_ids or token_id in self._stop_ids):
            stop = str(token_id) if token_id in self._stop_ids else None
            return StreamUpdate(self.finish(), FinishReason.STOP, stop)
        text = self._held + self._decoder.push(token_id)
        self._held = ""
        if not may_stop or not self._sampling.stop:
            return StreamUpdate(text)
        match = find_stop(text, self._sampling.stop)
        if match is not None:
            return StreamUpdate(self._cut(text, *match), FinishReason.STOP, match[1])
        n_held = longest_partial_stop(text, self._sampling.stop)
        self._held = text[len(text) - n_held :]
        return StreamUpdate(text[: len(text) - n_held])

    def finish(self) -> str:
        """The request ends without a stop string: release what was held back. Nothing may be pushed afterwards."""
        text = self._held + self._decoder.finish()
        self._held = ""
        match = find_stop(text, self._sampling.stop)  # the end of an invalid sequence may complete one
        return text if match is None else self._cut(text, *match)

    def _cut(self, text: str, start: int, stop: str) -> str:
        return text[: start + len(stop)] if self._sampling.include_stop_text else text[:start]


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop string) of the match that is complete first; of several that end together, the longest.

    By where a match ends, not where it starts: so the answer does not depend on how the text was cut into tokens.
    """
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def longest_partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
    best = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), best, -1):
            if text.endswith(stop[:length]):
                best = length
                break
    return best
