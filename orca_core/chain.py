"""The name of a block's content: a digest of every token from the beginning of the sequence to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

from orca_core.errors import InvariantError

_ROOT: Final = bytes(32)


class BlockChain:
    """Digests of the full blocks of one sequence of tokens, made when they are asked for and kept.

    ``digest(i) = SHA-256(digest(i - 1) + the block's token ids)``, each id in eight bytes. K and V of a position depend
    on the tokens up to it and on nothing else of a request, so equal digests mean equal content. Every input has the
    same length, so no two sequences give the same input; and nobody can make two that collide, short of breaking
    SHA-256: a crafted prompt cannot reach another's K and V.

    ``token_ids`` is not copied: the sequence may grow, and must not change otherwise.
    """

    __slots__ = ("_block_size", "_digests", "_token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._digests: list[bytes] = []
        self._block_size = 0

    def __len__(self) -> int:
        """Tokens of the sequence, as of now."""
        return len(self._token_ids)

    def digest(self, index: int, block_size: int) -> bytes:
        """Digest (32 bytes) of block ``index``. Raises ``InvariantError`` where it is not full, or for a second block
        size.
        """
        if (index + 1) * block_size > len(self._token_ids) or self._block_size not in (0, block_size):
            raise InvariantError(f"no digest of block {index} of {block_size} of {len(self._token_ids)} tokens")
        self._block_size = block_size
        digests = self._digests
        while len(digests) <= index:
            start = len(digests) * block_size
            block = array("q", self._token_ids[start : start + block_size])
            digests.append(hashlib.sha256((digests[-1] if digests else _ROOT) + block.tobytes()).digest())
        return digests[index]
