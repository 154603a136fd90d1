"""The ledger: who was promised how many slots, and which blocks were taken against the promise."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from orca_core.chain import BlockChain
from orca_core.errors import InvariantError
from orca_core.kv.blocks import BlockStore


@dataclass(slots=True)
class _Holding:
    """What one admitted request holds. ``n_reserved``: its demand; its first ``n_cached`` slots were computed before
    it came; its first ``n_published`` blocks have been offered for sharing, or were found.
    """

    n_reserved: int
    blocks: array[int]
    chain: BlockChain | None
    n_used: int
    n_cached: int
    n_published: int


class KVManager:
    """The only book of slots in a replica. Used by the loop thread alone; knows nothing of tensors.

    The ledger counts slots exactly as the paper does, so a demand of precisely ``n_slots`` fits. A block that several
    requests share is counted once; with r(b) for the number of requests that hold block b, the books say at all times::

        reserved = sum of demands      - block_size * sum over blocks of (r(b) - 1)
        used     = sum of slots in use - block_size * sum over blocks of (r(b) - 1)

    Why an admitted request always gets every slot it was promised:

    1. ``reserved <= n_slots``. Only ``reserve`` adds to it: the demand, less the found blocks that others hold at that
       moment, and not unless the sum fits. Found blocks that are merely cached are paid for in full. ``publish`` and
       ``extend`` change neither a demand nor an r(b). ``release`` takes the demand off, but for the blocks that others
       still hold: whoever remains carries them, and has room for them, since they were in the sum all the time.
    2. There is a block when one is needed. A request never holds more than ceil(demand / block_size) blocks, so all
       together, blocks counted once, never more than sum of ceil(demand / block_size) - sum of (r(b) - 1), which is
       less than reserved / block_size + n_holders, hence at most ``n_blocks``. What nobody holds is free, be there
       something cached in it or not.

    Blocks are shared when they are full and a sound token was sampled over them (``publish``): never half written, and
    never with what may have come from a fault.
    """

    def __init__(self, n_slots: int, block_size: int, max_batch_size: int, *, prefix_cache: bool = True) -> None:
        self.n_slots = n_slots
        self.block_size = block_size
        self.max_holders = max_batch_size
        self.n_blocks = self.blocks_needed(n_slots, block_size, max_batch_size)
        self.prefix_cache = prefix_cache
        self._store = BlockStore(self.n_blocks)
        self._held: dict[str, _Holding] = {}
        self._n_reserved = 0
        self._n_used = 0

    @staticmethod
    def blocks_needed(n_slots: int, block_size: int, max_batch_size: int) -> int:
        """Blocks of the pool behind a ledger of ``n_slots``."""
        return -(-n_slots // block_size) + max_batch_size

    @property
    def reserved_slots(self) -> int:
        """Slots promised to admitted requests (``n_rsrv``)."""
        return self._n_reserved

    @property
    def used_slots(self) -> int:
        """Slots of admitted requests that hold a token's K and V now."""
        return self._n_used

    @property
    def cached_slots(self) -> int:
        """Free slots that hold K and V which a new request may find; they are as free as any other."""
        return self._store.n_cached * self.block_size

    @property
    def n_holders(self) -> int:
        """Admitted requests."""
        return len(self._held)

    def fits(self, n_slots: int) -> bool:
        """Whether a reservation of ``n_slots`` can be made now, even if nothing of it is shared."""
        return self._n_reserved + n_slots <= self.n_slots and len(self._held) < self.max_holders

    def reserve(self, request_id: str, n_slots: int, chain: BlockChain | None = None) -> bool:
        """Promise ``n_slots`` to a request, once, at admission. False, and nothing changed, where they don't fit.

        ``chain``: of the request's tokens; without it nothing is shared. Blocks that hold the K and V of the tokens it
        begins with become its first ones (see ``cached_tokens``), but for the last token: that is computed, to have
        logits.
        """
        if request_id in self._held:
            raise InvariantError(f"request {request_id} reserved twice")
        if n_slots < 1 or len(self._held) >= self.max_holders:
            return False
        found = self._find(chain, n_slots) if chain is not None and self.prefix_cache else []
        n_elsewhere = self.block_size * sum(self._store.in_use(block) for block in found)
        if self._n_reserved + n_slots - n_elsewhere > self.n_slots:
            return False
        for block in found:
            self._store.acquire(block)
        n_cached = self.block_size * len(found)
        self._held[request_id] = _Holding(n_slots, array("i", found), chain, n_cached, n_cached, len(found))
        self._n_reserved += n_slots - n_elsewhere
        self._n_used += n_cached - n_elsewhere
        return True

    def _find(self, chain: BlockChain, n_slots: int) -> list[int]:
        """The blocks that hold a sequence's first tokens, never its last; no more than ``n_slots`` have room for."""
        found: list[int] = []
        for index in range((min(len(chain), n_slots) - 1) // self.block_size):
            block = self._store.find(chain.digest(index, self.block_size))
            if block is None:
                break
            found.append(block)
        return found

    def cached_tokens(self, request_id: str) -> int:
        """How many of an admitted request's first tokens had their K and V in the pool when it was admitted."""
        return self._held[request_id].n_cached

    def extend(self, request_id: str, n_tokens: int) -> list[int]:
        """Take the next ``n_tokens`` slots of a request's reservation; returns their flat indices in the pool."""
        slots = array("q", bytes(8 * max(n_tokens, 0)))
        self.extend_into(request_id, n_tokens, slots, 0)
        return slots.tolist()

    def extend_into(self, request_id: str, n_tokens: int, slots: array[int], at: int) -> Sequence[int]:
        """As ``extend``, but writes the indices to ``slots`` from ``at`` on.

        Returns the request's block table, which grows with it: not a copy, and not to be changed.
        """
        holding = self._held[request_id]
        start = holding.n_used
        end = start + n_tokens
        if n_tokens < 1 or end > holding.n_reserved:
            raise InvariantError(f"request {request_id} wants slot {end} of {holding.n_reserved} reserved")
        size, blocks = self.block_size, holding.blocks
        while len(blocks) * size < end:
            blocks.append(self._store.take())
        holding.n_used = end
        self._n_used += n_tokens
        for i in range(start, end):
            slots[at] = blocks[i // size] * size + i % size
            at += 1
        return blocks

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """The request's block table: block i holds its tokens ``i * block_size`` and on."""
        return tuple(self._held[request_id].blocks)

    def publish(self, request_id: str) -> None:
        """Let others share the request's full blocks. Call when the K and V of all slots taken so far are computed,
        and found sound.
        """
        holding = self._held[request_id]
        n_full = holding.n_used // self.block_size
        if n_full == holding.n_published or holding.chain is None or not self.prefix_cache:
            return
        for index in range(holding.n_published, n_full):
            self._store.share(holding.blocks[index], holding.chain.digest(index, self.block_size))
        holding.n_published = n_full

    def distrust(self, request_id: str) -> None:
        """Something was unsound over a request's K and V: nobody new may find them. No error for an unknown id."""
        holding = self._held.get(request_id)
        for block in holding.blocks if holding else ():
            self._store.forget(block)

    def release(self, request_id: str) -> None:
        """Return everything a request holds, used or only reserved. A request without a reservation is no error."""
        holding = self._held.pop(request_id, None)
        if holding is None:
            return
        # last block first: of a sequence whose beginning is gone nothing can be found
        n_elsewhere = self.block_size * sum(self._store.give_back(block) for block in reversed(holding.blocks))
        self._n_reserved -= holding.n_reserved - n_elsewhere
        self._n_used -= holding.n_used - n_elsewhere

    def check_idle(self) -> None:
        """What of the audit costs nothing, for each time the engine falls idle. Raises ``InvariantError``."""
        if self._held or self._n_reserved or self._n_used:
            raise InvariantError(
                f"idle, but {len(self._held)} requests hold slots; {self._n_reserved} are reserved, {self._n_used} used"
            )
        self._store.check_all_free()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Audit the ledger; ``idle``: nothing may be held at all. Raises ``InvariantError`` saying what is off."""
        holdings = self._held.values()
        self._store.check_integrity(holding.blocks for holding in holdings)
        blocks = [block for holding in holdings for block in holding.blocks]
        n_twice = self.block_size * (len(blocks) - len(set(blocks)))
        reserved = sum(holding.n_reserved for holding in holdings) - n_twice
        used = sum(holding.n_used for holding in holdings) - n_twice
        if reserved != self._n_reserved or used != self._n_used:
            raise InvariantError(f"books say {self._n_reserved}/{self._n_used} slots, holdings {reserved}/{used}")
        if not used <= reserved <= self.n_slots:
            raise InvariantError(f"used {used} <= reserved {reserved} <= n_slots {self.n_slots} does not hold")
        for request_id, holding in self._held.items():
            if len(holding.blocks) != -(-holding.n_used // self.block_size):
                raise InvariantError(f"request {request_id}: {len(holding.blocks)} blocks for {holding.n_used} slots")
        if idle and self._held:
            raise InvariantError(f"idle, but {len(self._held)} requests hold {reserved} slots")
