"""Small tokenizers built in code: byte-level BPE, SentencePiece-like with byte fallback, WordPiece."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, T5Tokenizer

from orca_core.source import ModelSource
from orca_core.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>", "<|end|>")
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_byte_level(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """256 byte tokens (ids 3 to 258), a few merges, one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("t", "h"), ("th", "e")]
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet, *("".join(pair) for pair in merges)))}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _save(backend, folder, chat_template)


def save_sentencepiece(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Metaspace words and characters, 256 byte tokens, the decoder of Llama 2."""
    words = ["▁", "▁the", "▁a", "▁cat", "the", "s", "t", "h", "e", "a", "c", "é", "▁é", "日", "."]
    vocab = {token: i for i, token in enumerate((*SPECIAL, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words))}
    merges = [("▁", "é"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    vocab["th"] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(backend, folder, chat_template)


def save_metaspace(folder: Path, chat_template: str | None = None) -> Path:
    """Spaces spelled by a mark and nothing else: T5's and XLNet's decoder."""
    tokens = (*SPECIAL, "<unk>", "▁", "▁▁", "▁the", "the", "▁cat", "s", "▁a▁b", "é", ".")
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _save(backend, folder, chat_template)


def save_wordpiece(folder: Path, chat_template: str | None = None) -> Path:
    """A family this project knows no bytes of: it goes through the window decoder."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, "[UNK]", "the", "cat", "s", "##s", "##at", "c", "."))}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece("##", cleanup=False)
    return _save(backend, folder, chat_template)


SPM_WORDS: Final = (
    "▁", "▁the", "▁a", "▁cat", "the", "s", "t", "h", "e", "a", "c", "é", "▁é", "日", ".", "th", "▁▁", "▁▁▁", "\n",
)  # fmt: skip
SPM_BYTES: Final = tuple(f"<0x{i:02X}>" for i in range(256))
_SPM_MERGES: Final = [("▁", "é"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁")]


def save_llama2(folder: Path) -> Path:
    """As transformers builds it: the space before the first word comes from Metaspace, once a text."""
    vocab = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", *SPM_BYTES, *SPM_WORDS))}
    LlamaTokenizer(vocab=vocab, merges=_SPM_MERGES).save_pretrained(str(folder))
    return folder


def save_gemma(folder: Path) -> Path:
    """Byte fallback too, but no space before the first word and none taken off a decode."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    vocab = {token: i for i, token in enumerate((*special, *SPM_BYTES, *SPM_WORDS))}
    GemmaTokenizer(vocab=vocab, merges=_SPM_MERGES).save_pretrained(str(folder))
    return folder


def save_t5(folder: Path) -> Path:
    """Unigram; what it cannot spell is one unknown token, and all white space is one space."""
    vocab = [(token, -float(i)) for i, token in enumerate(("<pad>", "</s>", "<unk>", *SPM_WORDS))]
    T5Tokenizer(vocab=vocab, extra_ids=3).save_pretrained(str(folder))
    return folder


def _save(backend: Backend, folder: Path, chat_template: str | None) -> Path:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool use>", special=False)])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if chat_template is not None:
        inner.chat_template = chat_template
    inner.save_pretrained(str(folder))
    return folder


def load(folder: Path) -> Tokenizer:
    """The product's tokenizer of a folder."""
    return Tokenizer.load(ModelSource("tiny", "safetensors", folder, None))


def byte_level_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """See ``save_byte_level``."""
    return load(save_byte_level(folder, chat_template))


def sentencepiece_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """See ``save_sentencepiece``."""
    return load(save_sentencepiece(folder, chat_template))


def metaspace_tokenizer(folder: Path) -> Tokenizer:
    """See ``save_metaspace``."""
    return load(save_metaspace(folder))


def wordpiece_tokenizer(folder: Path) -> Tokenizer:
    """See ``save_wordpiece``."""
    return load(save_wordpiece(folder))


def llama2_tokenizer(folder: Path) -> Tokenizer:
    """See ``save_llama2``."""
    return load(save_llama2(folder))


def gemma_tokenizer(folder: Path) -> Tokenizer:
    """See ``save_gemma``."""
    return load(save_gemma(folder))


def t5_tokenizer(folder: Path) -> Tokenizer:
    """See ``save_t5``."""
    return load(save_t5(folder))


FAMILIES: Final = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "metaspace": metaspace_tokenizer,
    "wordpiece": wordpiece_tokenizer,
    "llama2": llama2_tokenizer,
    "gemma": gemma_tokenizer,
    "t5": t5_tokenizer,
}


def decode_by_token(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join([*(decoder.push(token_id) for token_id in ids), decoder.finish()])


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer._backend.token_to_id(token)
    assert token_id is not None, token
    return int(token_id)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, whatever merges there are."""
    found = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    if tokenizer._backend.token_to_id("<0x00>") is not None:
        return [id_of(tokenizer, f"<0x{value:02X}>") for value in data]
    return [found[bytes([value])] for value in data]
