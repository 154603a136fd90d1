"""The tokenizer of a model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from orca_core.detokenizer import IncrementalDecoder, PieceTable, WindowDecoder, decoder_for, read_rules, spell
from orca_core.errors import InvalidRequestError, ModelLoadError, OrcaError
from orca_core.source import ModelSource
from orca_core.tokenizer.loading import load_inner
from orca_core.tokenizer.panics import TokenizerPanicError, panics_as_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_INTERNALS: Final = re.compile(
    r"__(globals|builtins|class|bases?|mro|subclasses|init|dict|code|import|getattribute|self)__"
)
"""Names that only an attack has a use for. The sandbox keeps them out; a model that tries is not served at all."""

_LONG_TEXT: Final = 4096
"""Characters from which on a text is encoded with the interpreter lock released: 2 MB take about a second."""

_SAMPLE: Final = "Hello, world! 12 \u00e9\u00df \u65e5\u672c\n"
"""Read once at load: letters, digits, marks, accents and another script."""

_CUT: Final = "\ufdd0"
"""Put into special tokens that a chat message spells out. A Unicode noncharacter: no text has a use for it."""


class Tokenizer:
    """Wraps a fast transformers tokenizer. Every method may be called from any thread.

    A *prompt* that spells a special token (``<|im_end|>``) means that token, as in other servers: a caller may write a
    chat by hand. In a *chat message* it is plain text: nobody ends his turn and speaks as the system that way.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(inner.name_or_path, "its tokenizer has no fast (tokenizers library) form")
        if _INTERNALS.search(json.dumps(inner.chat_template)):
            raise ModelLoadError(inner.name_or_path, "its chat template reaches for Python internals")
        # truncation and padding are state of the backend: off once, so that no call ever changes what another one sees
        backend.no_truncation()
        backend.no_padding()
        self._inner = inner
        self._backend = backend
        special = {i: str(token.content) for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._special = frozenset(special)
        names = sorted((name for name in special.values() if len(name) > 1), key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        rules = read_rules(json.loads(backend.to_str()).get("decoder"))
        self._pieces = None if rules is None else PieceTable(rules, backend.id_to_token, self._special)

    @classmethod
    def load(cls, source: ModelSource) -> Self:
        """From the model's own files. Raises ``ModelLoadError``, also where it cannot read a line of text."""
        try:
            with panics_as_errors():
                made = cls(load_inner(source))
                made._try_out()
        except OrcaError:
            raise
        except Exception as error:  # of a library that was handed odd files
            raise ModelLoadError(source.name, f"tokenizer: {type(error).__name__}: {error}") from error
        return made

    def _try_out(self) -> None:
        """Some rules are looked at only when a text meets them. That a text is refused is no fault of the tokenizer."""
        ids: list[int] = []
        with suppress(InvalidRequestError):
            ids = self._encoded(_SAMPLE, "prompt", add_special_tokens=True)
        self.decode(ids)

    @cached_property
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

        Raises ``InvalidRequestError`` for text that is no Unicode (lone surrogates), or that the library cannot read.
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of (role, content) messages, ready for the assistant's answer. The template writes its own BOS.

        Raises as ``render_chat`` does.
        """
        if not any(self._special_names.search(part.replace(_CUT, "")) for message in messages for part in message):
            return self._encode(self.render_chat(messages), "messages", add_special_tokens=False)
        text = self.render_chat([(self._cut_specials(role), self._cut_specials(text)) for role, text in messages])
        # neither half of a special token is one: what the template wrote stays whole, what a message wrote does not
        return [
            token_id
            for part in text.split(_CUT)
            for token_id in self._encode(part, "messages", add_special_tokens=False)
        ]

    def _cut_specials(self, text: str) -> str:
        return self._special_names.sub(lambda match: match[0][0] + _CUT + match[0][1:], text.replace(_CUT, ""))

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(field, "must be valid Unicode, without lone surrogates") from None
        try:
            return self._encoded(text, field, add_special_tokens=add_special_tokens)
        except TokenizerPanicError:
            logger.exception("a text of %d characters made the tokenizer panic", len(text))
            raise InvalidRequestError(field, "the model's tokenizer cannot read this text") from None

    def _encoded(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            with panics_as_errors():
                if len(text) < _LONG_TEXT:
                    encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
                else:  # the one call of the library that releases the interpreter lock
                    encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except TokenizerPanicError:
            raise
        except Exception as error:  # such as a word that is not in a vocabulary without one for the unknown
            logger.warning("a text of %d characters was not encoded: %s", len(text), type(error).__name__)
            raise InvalidRequestError(field, "the model's tokenizer cannot read this text") from None
        ids: list[int] = encoding.ids
        return ids

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Text of (role, content) messages by the model's chat template.

        Templates come from model files and are not trusted: transformers renders them in Jinja's immutable sandbox.
        A request cannot bring its own. Raises ``InvalidRequestError`` where there is no template, or where it refuses
        the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError("messages", "this model has no chat template; send a prompt")
        if not messages:
            raise InvalidRequestError("messages", "must have at least one message")
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
        return WindowDecoder(self.decode, self._is_text) if self._pieces is None else decoder_for(self._pieces)

    def _is_text(self, token_id: int) -> bool:
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens and with spaces as they are: what a stream's text adds up to."""
        with panics_as_errors():  # in the engine's loop, which no single request may end
            return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text; empty for special and unknown ids."""
        if self._pieces is None:
            return self.decode([token_id]).encode()
        return spell(self._pieces(token_id), self._pieces.rules)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by their name; bytes that are no text alone become U+FFFD."""
        if token_id in self._special:
            return str(self._backend.id_to_token(token_id))
        return self.token_bytes(token_id).decode("utf-8", "replace")
