"""Text to token ids and back, and chat templates: transformers' tokenizers behind a small, thread-safe face."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from orca_core.detokenizer import BytesDecoder, IncrementalDecoder, PieceTable, WindowDecoder
from orca_core.errors import InvalidRequestError, ModelLoadError
from orca_core.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Tokenizer:
    """Wraps a fast transformers tokenizer. Every method may be called from any thread.

    Strings that spell a special token (``<|im_end|>``) inside a prompt are read as that token, as other servers do: a
    caller may write a chat prompt by hand.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(inner.name_or_path, "its tokenizer has no fast (tokenizers library) form")
        # truncation and padding are state of the backend: off once, so that no call ever changes what another one sees
        backend.no_truncation()
        backend.no_padding()
        self._inner = inner
        self._backend = backend
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        pieces = PieceTable(decoder, backend.id_to_token, self._special)
        self._pieces = pieces if pieces.is_known else None
        self._piece = lru_cache(maxsize=None)(pieces.piece)  # at most one entry an id of the vocabulary

    @classmethod
    def load(cls, source: ModelSource) -> Self:
        """From the model's own files. Raises ``ModelLoadError``."""
        from transformers import AutoTokenizer

        kwargs: dict[str, Any] = {"trust_remote_code": False, "use_fast": True}
        if source.gguf_file is not None:
            kwargs["gguf_file"] = source.gguf_file.name
        try:
            inner = AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True, **kwargs)
        except Exception as error:  # the library raises whatever its parsers raise
            raise ModelLoadError(source.name, f"tokenizer: {type(error).__name__}: {error}") from error
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence id, if it has one."""
        eos_id = self._inner.eos_token_id
        return () if eos_id is None else (int(eos_id),)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._inner.chat_template)

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer puts around one (such as BOS).

        Raises ``InvalidRequestError`` for text that is no Unicode (lone surrogates).
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(field, "must be valid Unicode, without lone surrogates") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of (role, content) messages, ready for the assistant's answer. The template writes its own BOS."""
        return self._encode(self.render_chat(messages), "messages", add_special_tokens=False)

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Text of (role, content) messages by the model's chat template.

        Templates come from model files and are not trusted: transformers renders them in Jinja's immutable sandbox.
        Raises ``InvalidRequestError`` where there is no template, or where it refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError("messages", "this model has no chat template; send a prompt")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._inner.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # the text of the error is the template's own and may quote the messages: only its kind is told
            logger.warning("chat template failed: %s", type(error).__name__)
            reason = f"the model's chat template refused them ({type(error).__name__})"
            raise InvalidRequestError("messages", reason) from None
        return str(text)

    # ---- ids to text

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder for one sequence of output tokens."""
        if self._pieces is not None:
            return BytesDecoder(self._piece, self._pieces.strips_space)
        return WindowDecoder(self._decode_whole)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens: what a stream's text adds up to."""
        if self._pieces is None:
            return self._decode_whole(token_ids)
        decoder = self.decoder()
        parts = [decoder.push(token_id) for token_id in token_ids]
        return "".join([*parts, decoder.finish()])

    def _decode_whole(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for special ones."""
        if self._pieces is not None:
            return self._piece(token_id)
        return self._decode_whole([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by their name; bytes that are no text alone become U+FFFD."""
        if token_id in self._special:
            return str(self._backend.id_to_token(token_id))
        return self.token_bytes(token_id).decode("utf-8", "replace")
