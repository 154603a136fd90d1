"""From chunks to OpenAI response bodies: dicts that are always valid JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deployment.openai_requests import OpenAIRequest
from orca_core.types import GenerationChunk, PositionLogprobs, TokenLogprob, Usage

_LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity (a masked token), which JSON cannot say."""


@dataclass(slots=True)
class Choice:
    """What is known so far of one choice. ``offset``: characters of text before the next token, echo included."""

    index: int
    offset: int = 0
    role_sent: bool = False
    last: GenerationChunk | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class Answer:
    """Builds the bodies of one HTTP answer, streamed or whole.

    ``echoes``: text to put before each choice's own, by choice index. ``created``: Unix seconds.
    """

    def __init__(self, request: OpenAIRequest, answer_id: str, created: int, model: str, echoes: Sequence[str]) -> None:
        self._request = request
        self._head = {"id": answer_id, "created": created, "model": model}
        self._echoes = echoes
        self._choices = [Choice(index, len(echo)) for index, echo in enumerate(echoes)]

    def unfinished(self) -> bool:
        """Whether a choice still lacks its finish reason."""
        return any(choice.last is None for choice in self._choices)

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Keep a chunk for the whole answer."""
        choice = self._choices[index]
        choice.text.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            choice.last = chunk

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        kind = "chat.completion" if self._request.chat else "text_completion"
        choices = [self._whole_choice(choice) for choice in self._choices]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def events(self, index: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """The stream events of one chunk: none where it says nothing new."""
        choice = self._choices[index]
        bodies = []
        prefix = ""
        if not choice.role_sent:
            choice.role_sent = True
            if self._request.chat:
                bodies.append(self._chat_event(choice, {"role": "assistant", "content": ""}, None, None))
            else:
                prefix = self._echoes[index]
        if chunk.finish_reason is not None:
            choice.last = chunk
        if not (prefix or chunk.text or chunk.logprobs or chunk.finish_reason):
            return bodies
        if self._request.chat:
            delta = {"content": chunk.text} if chunk.text else {}
            bodies.append(self._chat_event(choice, delta, chunk, self._chat_logprobs(chunk.logprobs)))
        else:
            logprobs = self._completion_logprobs(choice, chunk.logprobs)
            body = {"index": index, "text": prefix + chunk.text, "logprobs": logprobs, **_finish(chunk)}
            bodies.append(self._event("text_completion", [body]))
        return bodies

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream that asked for usage."""
        kind = "chat.completion.chunk" if self._request.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self._usage()}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        finish = _finish(choice.last)
        if not self._request.chat:
            logprobs = self._completion_logprobs(choice, choice.logprobs)
            return {"index": choice.index, "text": self._echoes[choice.index] + text, "logprobs": logprobs, **finish}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": self._chat_logprobs(choice.logprobs), **finish}

    def _chat_event(
        self, choice: Choice, delta: dict[str, Any], chunk: GenerationChunk | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        body = {"index": choice.index, "delta": delta, "logprobs": logprobs, **_finish(chunk)}
        return self._event("chat.completion.chunk", [body])

    def _event(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": kind, "choices": choices}
        return {**event, "usage": None} if self._request.include_usage else event

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        usages = [choice.last.usage if choice.last and choice.last.usage else Usage() for choice in self._choices]
        firsts = usages[:: self._request.n]
        prompt, completion = sum(u.prompt_tokens for u in firsts), sum(u.completion_tokens for u in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_prompt_tokens for u in firsts)},
        }

    def _wanted(self) -> bool:
        return self._request.calls[0].sampling.logprobs is not None

    def _chat_logprobs(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if not self._wanted():
            return None
        content = [{**_token(p.chosen), "top_logprobs": [_token(top) for top in p.top]} for p in positions]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, choice: Choice, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if not self._wanted():
            return None
        tops: list[dict[str, float]] = []
        offsets = []
        for position in positions:
            top: dict[str, float] = {}
            for token in (*position.top, position.chosen):
                top.setdefault(token.text, _finite(token.logprob))  # two ids may read the same: the likelier stays
            tops.append(top)
            offsets.append(choice.offset)
            choice.offset += len(position.chosen.text)
        return {
            "tokens": [p.chosen.text for p in positions],
            "token_logprobs": [_finite(p.chosen.logprob) for p in positions],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def to_json(body: dict[str, Any]) -> bytes:
    """Compact JSON. Raises ``ValueError`` rather than write NaN."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


def _finish(chunk: GenerationChunk | None) -> dict[str, Any]:
    """``stop_reason``, as vLLM has it: the stop string or token id that matched."""
    if chunk is None or chunk.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": chunk.finish_reason.value, "stop_reason": chunk.stop}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(value: float) -> float:
    return max(value, _LOWEST_LOGPROB) if math.isfinite(value) else _LOWEST_LOGPROB
