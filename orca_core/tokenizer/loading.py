"""A tokenizer from the files of a model."""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import pre_tokenizers

from orca_core.errors import ModelLoadError
from orca_core.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPLIT_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""``tokenizer.ggml.pre`` of byte-level vocabularies that were trained with every digit on its own. transformers (5.24)
reads them like GPT-2's, where a space sticks to the digit behind it. Names: llama.cpp, src/llama-vocab.cpp."""

_FIXED_SIZES: Final[Mapping[int, int]] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING: Final = 8
_ARRAY: Final = 9
_ONE_AT_A_TIME: Final = threading.Lock()
"""The library's imports happen at the first use of a name, and fail in whoever comes second meanwhile."""


def load_inner(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer transformers makes of a model. No code of the model is ever run. Raises ``ModelLoadError``."""
    try:
        with _ONE_AT_A_TIME:
            return _from_folder(source.folder) if source.gguf_file is None else _from_gguf(source.gguf_file)
    except Exception as error:  # the library raises whatever its parsers raise
        raise ModelLoadError(source.name, f"tokenizer: {type(error).__name__}: {error}") from error


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    inner: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
    )
    return inner


def _from_gguf(file: Path) -> PreTrainedTokenizerBase:
    """Not through ``AutoTokenizer``: it reads the whole file for a configuration that is not used, for seconds."""
    from transformers import PreTrainedTokenizerFast

    inner: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True
    )
    if _gguf_string(file, "tokenizer.ggml.pre") in _SPLIT_DIGITS:
        inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return inner


def _gguf_string(file: Path, wanted: str) -> str | None:
    """One string of a GGUF file's metadata; the ``gguf`` library would build objects for every token first.

    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little-endian).
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _, _, _, n_keys = struct.unpack_from("<4sIQQ", data, 0)
        at = 24
        for _ in range(n_keys):
            key, at = _read_string(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            if key == wanted and kind == _STRING:
                return _read_string(data, at + 4)[0]
            at = _end_of_value(data, at + 4, kind)
    return None


def _read_string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    return data[at + 8 : end].decode("utf-8", "replace"), end


def _end_of_value(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != _ARRAY:
        return at + _FIXED_SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _FIXED_SIZES:
        return at + int(count) * _FIXED_SIZES[inner]
    for _ in range(count):
        at = _end_of_value(data, at, inner)
    return at
