"""From an OpenAI request body to ``GenerationCall``s. Nothing is started here, and nothing that is wrong gets through.

Defaults of this face are OpenAI's: temperature 1 and top_p 1 (the gRPC face is greedy unless told otherwise). Fields of
the OpenAI API that this service lacks are refused when they are set to something that matters; fields nobody knows are
accepted and ignored, since clients send many of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from deployment.config_sections import LimitsSection
from deployment.openai_fields import boolean, integer, number, refuse_unsupported, text_value, token_id_list
from deployment.serving import ChatMessage, GenerationCall
from orca_core.errors import InvalidRequestError
from orca_core.params import MAX_SEED, SAMPLING_RANGES, SamplingParams
from orca_core.types import ROLES

FIELD_NAMES: Final[Mapping[str, str]] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Our name of a field -> its name at this face."""

_TOKEN_ID: Final = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A parsed body. ``calls``: one per choice, by choice index; the ``n`` choices of a prompt follow each other."""

    calls: tuple[GenerationCall, ...]
    chat: bool
    n: int
    stream: bool
    include_usage: bool
    echo: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request body. Refuses what JSON does not know but Python's reader does: NaN and infinities."""

    def refuse(_: str) -> NoReturn:
        raise InvalidRequestError("body", "NaN and Infinity are not JSON")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise InvalidRequestError("body", "a number is too large")
        return value

    try:
        parsed = json.loads(body, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError):
        raise InvalidRequestError("body", "is not valid JSON") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError("body", "must be a JSON object")
    return parsed


def parse_completion(
    body: Mapping[str, Any], limits: LimitsSection, request_id: str, timeout_s: float | None = None
) -> OpenAIRequest:
    """The calls of a ``/v1/completions`` body. Raises ``InvalidRequestError`` naming the field."""
    refuse_unsupported(body, chat=False)
    n = _count(body, limits)
    if integer(body, "best_of") not in (None, n):
        raise InvalidRequestError("best_of", f"must be n, here {n}: choosing among more is not supported")
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * n > limits.max_choices:
        raise InvalidRequestError("n", f"{len(prompts)} prompts times n {n} is above the limit of {limits.max_choices}")
    logprobs = integer(body, "logprobs")
    echo = boolean(body, "echo")
    if echo and logprobs is not None:
        raise InvalidRequestError("logprobs", "is not supported together with echo")
    shared = _shared(body, request_id, timeout_s)
    sampling = [_sampling(body, limits, logprobs, "logprobs", choice) for choice in range(n)]
    calls = tuple(GenerationCall(**prompt, **shared, sampling=each) for prompt in prompts for each in sampling)
    stream, include_usage = _streaming(body)
    return OpenAIRequest(calls, False, n, stream, include_usage, echo)


def parse_chat(
    body: Mapping[str, Any], limits: LimitsSection, request_id: str, timeout_s: float | None = None
) -> OpenAIRequest:
    """The calls of a ``/v1/chat/completions`` body. Raises ``InvalidRequestError`` naming the field."""
    refuse_unsupported(body, chat=True)
    n = _count(body, limits)
    messages = _messages(body.get("messages"))
    wanted, top = boolean(body, "logprobs"), integer(body, "top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
    logprobs = (top or 0) if wanted else None
    shared = _shared(body, request_id, timeout_s)
    sampling = [_sampling(body, limits, logprobs, "top_logprobs", choice) for choice in range(n)]
    calls = tuple(GenerationCall(messages=messages, **shared, sampling=each) for each in sampling)
    stream, include_usage = _streaming(body)
    return OpenAIRequest(calls, True, n, stream, include_usage, echo=False)


def _shared(body: Mapping[str, Any], request_id: str, timeout_s: float | None) -> dict[str, Any]:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("model", "must be a string")
    return {"model": model or "", "client_request_id": request_id, "timeout_s": timeout_s, "api": "http"}


def _sampling(
    body: Mapping[str, Any], limits: LimitsSection, logprobs: int | None, logprobs_name: str, choice: int
) -> SamplingParams:
    """Sampling of one choice; its seed is the request's plus its index. ``SamplingParams`` itself checks the ranges."""
    if logprobs is not None and not 0 <= logprobs <= limits.max_logprobs:
        raise InvalidRequestError(logprobs_name, f"must be an integer in [0, {limits.max_logprobs}]")
    seed = integer(body, "seed")
    if seed is not None:
        if not -(2**63) <= seed <= MAX_SEED:
            raise InvalidRequestError("seed", "must fit in 64 bits")
        seed = (seed + choice) % (MAX_SEED + 1)
    return SamplingParams(
        max_new_tokens=_max_new_tokens(body),
        min_new_tokens=integer(body, "min_tokens") or 0,
        temperature=number(body, "temperature", 1.0),
        top_p=number(body, "top_p", 1.0),
        top_k=_top_k(body),
        min_p=number(body, "min_p", 0.0),
        seed=seed,
        stop=_stop(body, limits),
        stop_token_ids=token_id_list(body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=boolean(body, "ignore_eos"),
        include_stop_text=boolean(body, "include_stop_str_in_output"),
        repetition_penalty=number(body, "repetition_penalty", 1.0),
        presence_penalty=number(body, "presence_penalty", 0.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0),
        logit_bias=_logit_bias(body.get("logit_bias")),
        logprobs=logprobs,
    )


def _max_new_tokens(body: Mapping[str, Any]) -> int | None:
    old, new = integer(body, "max_tokens"), integer(body, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequestError("max_tokens", "differs from max_completion_tokens; give one of them")
    return old if new is None else new


def _top_k(body: Mapping[str, Any]) -> int:
    top_k = integer(body, "top_k") or 0
    if top_k == -1:  # how vLLM's clients say "off"
        return 0
    legal = SAMPLING_RANGES["top_k"]
    if not legal.contains(top_k):
        raise InvalidRequestError("top_k", f"must be an integer in {legal}, or -1; 0 and -1 are off")
    return top_k


def _count(body: Mapping[str, Any], limits: LimitsSection) -> int:
    n = integer(body, "n")
    n = 1 if n is None else n
    if not 1 <= n <= limits.max_choices:
        raise InvalidRequestError("n", f"must be an integer in [1, {limits.max_choices}]")
    return n


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """``stream`` and ``stream_options.include_usage``."""
    stream = boolean(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, Mapping):
        raise InvalidRequestError("stream_options", "must be an object")
    if not stream:
        raise InvalidRequestError("stream_options", "needs stream to be true")
    return stream, boolean(options, "include_usage")


def _stop(body: Mapping[str, Any], limits: LimitsSection) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise InvalidRequestError("stop", "must be a string or a list of strings")
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequestError("stop", f"at most {limits.max_stop_strings} stop strings")
    return tuple(text_value(text, "stop") for text in stops)


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", "must be an object of token ids to numbers")
    if not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise InvalidRequestError("logit_bias", "keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[dict[str, Any]]:
    """``prompt`` in its four forms as keyword arguments of ``GenerationCall``; all are checked before one starts."""
    if isinstance(value, str):
        return [{"prompt": _prompt_text(value)}]
    if not isinstance(value, list):
        raise InvalidRequestError("prompt", "must be a string, a list of strings, token ids or a list of token ids")
    if not value:
        raise InvalidRequestError("prompt", "must not be empty")
    if isinstance(value[0], int):
        return [{"token_ids": token_id_list(value, "prompt")}]
    if isinstance(value[0], str):
        return [{"prompt": _prompt_text(text)} for text in value]
    prompts = [{"token_ids": token_id_list(ids, "prompt")} for ids in value]
    if not all(prompt["token_ids"] for prompt in prompts):
        raise InvalidRequestError("prompt", "must not be empty")
    return prompts


def _prompt_text(value: Any) -> str:
    text = text_value(value, "prompt")
    if not text:
        raise InvalidRequestError("prompt", "must not be empty")
    return text


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("messages", "must be a non-empty list")
    messages = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))
    if not any(message.content for message in messages):
        raise InvalidRequestError("messages", "at least one message must have content")
    return messages


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, "must be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    if value.get("tool_calls") or value.get("function_call"):
        raise InvalidRequestError(f"{where}.tool_calls", "is not supported")
    content = value.get("content")
    if isinstance(content, list):
        return ChatMessage(role, "\n".join(_part(part, f"{where}.content") for part in content))
    return ChatMessage(role, text_value(content, f"{where}.content"))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, Mapping) or value.get("type") != "text":
        raise InvalidRequestError(where, "parts must be objects of type text")
    return text_value(value.get("text"), where)
