"""Fields of an OpenAI request body: typed readers, and the table of those this service lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from orca_core.errors import InvalidRequestError


def text_value(value: Any, name: str) -> str:
    """A string that can be encoded: JSON can spell half of a surrogate pair, UTF-8 cannot."""
    if not isinstance(value, str):
        raise InvalidRequestError(name, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(name, "has an unpaired surrogate") from None
    return value


def token_id_list(value: Any, name: str) -> tuple[int, ...]:
    """A list of token ids; whether the model has them is not known here."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise InvalidRequestError(name, "token ids must be integers of at least 0")
    return tuple(value)


def integer(body: Mapping[str, Any], name: str) -> int | None:
    """An integer field; ``None`` where it is absent or null."""
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise InvalidRequestError(name, "must be an integer")


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """A number field; ``default`` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(name, "must be a number")
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """A truth value; false where it is absent or null."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequestError(name, "must be true or false")


def _is(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == known and type(value) is type(known) for known in harmless)


_never: Final = _is()
_UNSUPPORTED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "response_format": _is({"type": "text"}),
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "use_beam_search": _is(False),
    "length_penalty": _is(1, 1.0),
    "prompt_logprobs": _never,
    "truncate_prompt_tokens": _never,
    "allowed_token_ids": _is([]),
    "bad_words": _is([]),
    "skip_special_tokens": _is(True),
    "spaces_between_special_tokens": _is(True),
    "logits_processors": _is([]),
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "modalities": _is(["text"]),
    "audio": _never,
    "prediction": _never,
    "web_search_options": _never,
}
_UNSUPPORTED_COMPLETION: Final[Mapping[str, Callable[[Any], bool]]] = {
    "suffix": _is(""),
    "prompt_embeds": _never,
    "messages": _never,
    "top_logprobs": _never,
}
_UNSUPPORTED_CHAT: Final[Mapping[str, Callable[[Any], bool]]] = {
    "reasoning_effort": _is("none"),
    "verbosity": _is("medium"),
    "store": _is(False),
    "best_of": _is(1),
    "echo": _is(False),
    "prompt": _never,
    "chat_template": _never,
    "chat_template_kwargs": _is({}),
    "documents": _is([]),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "add_special_tokens": _is(False),
}
"""Known fields this service lacks -> whether a value of them changes nothing. ``null`` never does."""


def refuse_unsupported(body: Mapping[str, Any], chat: bool) -> None:
    """Raise ``InvalidRequestError`` for the first known field that this service lacks and that is set to matter."""
    table = {**_UNSUPPORTED, **(_UNSUPPORTED_CHAT if chat else _UNSUPPORTED_COMPLETION)}
    for name, harmless in table.items():
        value = body.get(name)
        if value is not None and not harmless(value):
            raise InvalidRequestError(name, "is not supported by this server")
