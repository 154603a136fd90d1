"""Panics of the tokenizers library, which is written in Rust, as ordinary exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MODULE: Final = "pyo3_runtime"
"""Where ``PanicException`` says it is from; it cannot be imported, and it is no ``Exception``."""


class TokenizerPanicError(Exception):
    """The library gave up amid a call. Its message may quote the text, so it is left out."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises ``TokenizerPanicError`` for a panic. Left alone it would pass every ``except Exception`` on its way."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__module__ != _MODULE:
            raise
        raise TokenizerPanicError("the tokenizers library panicked") from None
