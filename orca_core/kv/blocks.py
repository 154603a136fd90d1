"""The blocks of the pool: which are free, who refers to which, and what the shared ones hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from orca_core.errors import InvariantError


class BlockStore:
    """Every block, by its number, in exactly one of four states. Knows neither requests nor slots.

    - *blank*: free, and nothing in it is of use;
    - *private*: taken by one holder, who may write into it;
    - *shared*: full, computed, never written again; 1 or more holders refer to it;
    - *cached*: free, but its content can be found and shared again until the block is needed for something else.

    What a shared or cached block holds is its digest (see ``BlockChain``); the index has one block for a digest.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._blank: list[int] = list(range(n_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # by last use, the oldest first
        self._references: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def n_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def take(self) -> int:
        """A free block, private from now on: a blank one, or else the cached one that was not used for longest."""
        if self._blank:
            return self._blank.pop()
        if not self._cached:
            raise InvariantError(f"all {self.n_blocks} blocks are in use")
        block, _ = self._cached.popitem(last=False)
        self._drop_from_index(block)
        return block

    def find(self, digest: bytes) -> int | None:
        """The block that holds that content, shared or cached."""
        return self._block_of.get(digest)

    def in_use(self, block: int) -> bool:
        """Whether a block that was found is shared, not merely cached."""
        return block in self._references

    def acquire(self, block: int) -> None:
        """One more holder of a shared or cached block."""
        if block in self._references:
            self._references[block] += 1
        else:
            del self._cached[block]
            self._references[block] = 1

    def share(self, block: int, digest: bytes) -> None:
        """Let a private block be found, its holder being the first. Where another block holds the same, it stays
        private.
        """
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._references[block] = 1

    def give_back(self, block: int) -> bool:
        """A holder leaves a private or shared block. True where the block goes on, with its other holders."""
        n_references = self._references.get(block, 1) - 1
        if n_references:
            self._references[block] = n_references
            return True
        self._references.pop(block, None)
        if block in self._digest_of:
            self._cached[block] = None
        else:
            self._blank.append(block)
        return False

    def forget(self, block: int) -> None:
        """Let a private or shared block's content be found no more; its holders keep it."""
        if block in self._digest_of:
            self._drop_from_index(block)

    def _drop_from_index(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def check_all_free(self) -> None:
        """The counts that must hold when nobody holds a block; costs nothing. Raises ``InvariantError``."""
        n_blank, n_cached, n_indexed = len(self._blank), len(self._cached), len(self._digest_of)
        if self._references or n_blank + n_cached != self.n_blocks or not n_cached == n_indexed == len(self._block_of):
            raise InvariantError(
                f"idle, but of {self.n_blocks} blocks {len(self._references)} are shared, {n_blank} blank, "
                f"{n_cached} cached and {n_indexed} indexed"
            )

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Audit against the block tables of all holders; looks at every block (a microsecond each). Raises
        ``InvariantError``.
        """
        held = Counter(block for blocks in holdings for block in blocks)
        shared, cached = self._references.keys(), self._cached.keys()
        private = held.keys() - shared
        for block, n_holders in held.items():
            if n_holders != self._references.get(block, 1):
                raise InvariantError(f"block {block}: {n_holders} holders, books say {self._references.get(block, 1)}")
        if not shared <= held.keys():
            raise InvariantError(f"{len(shared - held.keys())} blocks have references, but no holder")
        sizes = {"blank": len(self._blank), "private": len(private), "shared": len(shared), "cached": len(cached)}
        if sum(sizes.values()) != self.n_blocks or len({*self._blank, *private, *shared, *cached}) != self.n_blocks:
            raise InvariantError(f"{sizes} blocks, but {self.n_blocks} there are")
        indexed = self._digest_of.keys()
        if not cached <= indexed or not indexed <= cached | shared:
            raise InvariantError("the index does not hold just the cached blocks and shared ones")
        if len(self._block_of) != len(indexed) or any(self._block_of[d] != b for b, d in self._digest_of.items()):
            raise InvariantError("the two directions of the index differ")
