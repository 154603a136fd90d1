"""Python's garbage collector in an actor that has loaded everything it will ever load."""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 20_000
"""Objects made since the last look at the young ones. The default of 700 means one look or more a busy iteration."""


def spare_what_is_loaded() -> None:
    """Take what there is now out of the collector's sight: libraries and a model, which never become garbage.

    A full collection walks all that it sees: with torch, transformers and Ray loaded some hundred milliseconds, in the
    middle of everybody's streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
