"""From what a client asks for to a ``GenerationRequest`` that cannot be wrong, without holding up the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from deployment.config import AppConfig
from deployment.serving import ChatMessage, GenerationCall
from orca_core.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError

MAX_CLIENT_ID_CHARACTERS: Final = 256

MAX_MESSAGES: Final = 4096
"""Of one chat: each costs time in the template however little it says."""

_ROLE: Final = re.compile("[a-z][a-z0-9_-]{0,31}")
"""Templates write the role as it is: with other characters in it, it could spell a control token or end its line."""


class IngressTokenizer(Protocol):
    """What the ingress needs of a tokenizer: see ``orca_core.tokenizer.Tokenizer``."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a chat, given as pairs of role and content, ready for the assistant's turn."""
        ...


class Preparation:
    """Checks calls against the limits and turns their text into token ids.

    Texts are measured before they are tokenised, and tokenised in a thread: one, since tokenizers cannot be shared.
    """

    def __init__(self, config: AppConfig, tokenizer: IngressTokenizer) -> None:
        self._model_id = config.model.id
        self._limits = config.limits
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "orca-tokenize")

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self, call: GenerationCall) -> None:
        """Refuse whatever can be refused without the model. Raises ``InvalidRequestError`` and ``NotFoundError``."""
        if len(call.client_request_id) > MAX_CLIENT_ID_CHARACTERS:
            raise InvalidRequestError("request_id", f"must have at most {MAX_CLIENT_ID_CHARACTERS} characters")
        if call.model not in ("", self._model_id):
            raise NotFoundError("model", call.model)
        if sum(given is not None for given in (call.prompt, call.token_ids, call.messages)) != 1:
            raise InvalidRequestError("prompt", "exactly one of prompt, token_ids and messages must be given")
        if call.prompt == "" or call.token_ids == ():
            raise InvalidRequestError("prompt", "must not be empty")
        if call.messages is not None:
            _check_messages(call.messages)
        if len(call.sampling.stop) > self._limits.max_stop_strings:
            raise InvalidRequestError("stop", f"at most {self._limits.max_stop_strings} stop strings")
        if (call.sampling.logprobs or 0) > self._limits.max_logprobs:
            raise InvalidRequestError("logprobs", f"must be at most {self._limits.max_logprobs}")

    async def token_ids(self, call: GenerationCall) -> Sequence[int]:
        """The prompt of a call that was checked. Raises ``PayloadTooLargeError`` and what the chat template raises."""
        if call.token_ids is not None:
            return call.token_ids
        if call.messages is not None:
            self._check_bytes(*(message.content for message in call.messages))
            chat_ids: list[int] = await self._in_thread(self._chat_ids, call.messages)
            return chat_ids
        return await self.encode(call.prompt or "")

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ``PayloadTooLargeError``."""
        self._check_bytes(text)
        token_ids: list[int] = await self._in_thread(self._tokenizer.encode, text)
        return token_ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids of the vocabulary."""
        text: str = await self._in_thread(self._tokenizer.decode, token_ids)
        return text

    def _chat_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self._tokenizer.encode_chat([(message.role, message.content) for message in messages])

    def _check_bytes(self, *texts: str) -> None:
        n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if n_bytes > self._limits.max_prompt_bytes:
            raise PayloadTooLargeError(n_bytes, self._limits.max_prompt_bytes)

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, argument)


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", f"at most {MAX_MESSAGES} messages")
    if not any(message.content for message in messages):
        raise InvalidRequestError("messages", "must hold at least one message with content")
    for message in messages:
        if not _ROLE.fullmatch(message.role):
            raise InvalidRequestError("messages.role", "must be a plain word such as system, user or assistant")
