"""From what a client asks for to a ``GenerationRequest`` that cannot be wrong, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, Final, Protocol

from deployment.config import AppConfig
from deployment.serving import ChatMessage, GenerationCall
from orca_core.errors import InvalidRequestError, NotFoundError, OverloadedError, PayloadTooLargeError
from orca_core.types import ROLES

MAX_CLIENT_ID_CHARACTERS: Final = 256

MAX_MESSAGES: Final = 4096
"""Of one chat: each costs time in the template however little it says."""

LARGE_BYTES: Final = 64 * 1024
"""Texts from that size on are tokenised in a lane of their own: 4 MiB take seconds, a usual prompt a millisecond."""

SHORT_BYTES: Final = 512
"""Texts up to that size are tokenised at once: it takes no longer than going to a thread and back, tenths of a
millisecond."""

MAX_LARGE: Final = 8
"""Large texts that are tokenised or wait for it; the next one is refused."""

_LARGE_RETRY_S: Final = 5.0


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

    Texts are measured before they are tokenised. Short prompts are at once, all else in threads: one for large texts,
    one for others, so that a large one holds up neither the event loop nor the small ones. ``tokenizer`` may be used
    from several threads.
    """

    def __init__(self, config: AppConfig, tokenizer: IngressTokenizer) -> None:
        self._model_id = config.model.id
        self._limits = config.limits
        self._tokenizer = tokenizer
        self._small = ThreadPoolExecutor(1, "orca-tokenize")
        self._large = ThreadPoolExecutor(1, "orca-tokenize-large")
        self._places = BoundedSemaphore(MAX_LARGE)

    def close(self) -> None:
        """End the threads. Idempotent."""
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

    def check(self, call: GenerationCall) -> None:
        """Refuse whatever can be refused without the model. Raises ``InvalidRequestError`` and ``NotFoundError``."""
        for name, given in (("request_id", call.client_request_id), ("session_id", call.session_id)):
            if len(given) > MAX_CLIENT_ID_CHARACTERS:
                raise InvalidRequestError(name, f"must have at most {MAX_CLIENT_ID_CHARACTERS} characters")
        self.check_model(call.model)
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

    def check_model(self, model: str) -> None:
        """Raises ``NotFoundError`` where a client names another model than the one that is served."""
        if model not in ("", self._model_id):
            raise NotFoundError("model", model)

    async def token_ids(self, call: GenerationCall) -> Sequence[int]:
        """The prompt of a call that was checked.

        Raises ``PayloadTooLargeError``, ``OverloadedError`` where too many large texts wait, and what the chat template
        raises.
        """
        if call.token_ids is not None:
            return call.token_ids
        if call.messages is not None:
            n_bytes = self._check_bytes(*(message.content for message in call.messages))
            chat_ids: list[int] = await self._in_lane(n_bytes, self._chat_ids, call.messages)
            return chat_ids
        return await self.encode(call.prompt or "")

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ``PayloadTooLargeError`` and ``OverloadedError``."""
        n_bytes = self._check_bytes(text)
        if n_bytes <= SHORT_BYTES:
            return self._tokenizer.encode(text)
        token_ids: list[int] = await self._in_lane(n_bytes, self._tokenizer.encode, text)
        return token_ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids of the vocabulary. Raises ``OverloadedError``."""
        text: str = await self._in_lane(len(token_ids), self._tokenizer.decode, token_ids)
        return text

    def _chat_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self._tokenizer.encode_chat([(ROLES[message.role], message.content) for message in messages])

    def _check_bytes(self, *texts: str) -> int:
        """Bytes of the texts together."""
        n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if n_bytes > self._limits.max_prompt_bytes:
            raise PayloadTooLargeError(n_bytes, self._limits.max_prompt_bytes)
        return n_bytes

    async def _in_lane(self, size: int, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call the function in the thread for arguments of that size, bytes of text or tokens."""
        loop = asyncio.get_running_loop()
        if size < LARGE_BYTES:
            return await loop.run_in_executor(self._small, function, argument)
        if not self._places.acquire(blocking=False):
            raise OverloadedError("too many large prompts are being tokenised", _LARGE_RETRY_S)
        work = self._large.submit(function, argument)
        # whoever leaves gives up its wait at once, but its place only when the thread is done with its text
        work.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(work)


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", f"at most {MAX_MESSAGES} messages")
    if not any(message.content for message in messages):
        raise InvalidRequestError("messages", "must hold at least one message with content")
    for message in messages:
        if message.role not in ROLES:
            raise InvalidRequestError("messages.role", f"must be one of {', '.join(ROLES)}")
