"""What callers of the library may hand in as a prompt, made into token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from orca_core.errors import InvalidRequestError
from orca_core.tokenizer import Tokenizer
from orca_core.types import ROLES

Prompt = str | Sequence[int] | torch.Tensor | np.ndarray
"""Text, or token ids: a sequence of them, or an array of integers with one dimension."""

ChatMessage = Mapping[str, str] | tuple[str, str]
"""``{"role": "user", "content": "Hi"}``, or ``("user", "Hi")``."""

LONG_TEXT: Final = 4096
"""Characters from which on tokenising would hold up an event loop: about a millisecond."""


@contextmanager
def named_prompt(index: int) -> Iterator[None]:
    """What is wrong with one of several prompts is wrong with ``prompts[INDEX]``; with another field of its, a note."""
    try:
        yield
    except InvalidRequestError as error:
        name = f"prompts[{index}]"
        if error.field == "prompt":
            raise InvalidRequestError(name, error.reason) from None
        error.add_note(f"of {name}")
        raise


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> Sequence[int]:
    """Token ids of a prompt; whether they fit is ``make_request``'s to say. Raises ``InvalidRequestError``."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("prompt", "must not be empty")
        return tokenizer.encode(prompt)
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return _listed(prompt)
    return prompt


def chat_ids(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of a chat by the model's own template, ready for the assistant's answer.

    Raises ``InvalidRequestError``: no template, no messages, another role than those of ``ROLES``, or what the template
    refuses.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", "must be a list of messages")
    pairs = [_pair(message) for message in messages]
    for index, (role, _) in enumerate(pairs):
        if role not in ROLES:
            raise InvalidRequestError(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    return tokenizer.encode_chat([(ROLES[role], content) for role, content in pairs])


def _pair(message: object) -> tuple[str, str]:
    parts: tuple[object, ...] = ()
    if isinstance(message, Mapping) and set(message) == {"role", "content"}:
        parts = (message["role"], message["content"])
    elif isinstance(message, tuple):
        parts = message
    match parts:
        case (str(role), str(content)):
            return role, content
    raise InvalidRequestError("messages", "each must be a mapping of role and content, both strings, or such a pair")


def _listed(array: torch.Tensor | np.ndarray) -> list[int]:
    ids: object = array.tolist() if array.ndim == 1 else None
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise InvalidRequestError("prompt", "an array must hold integers and have one dimension")
    return ids
