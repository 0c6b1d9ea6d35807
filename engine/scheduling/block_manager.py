"""Keeps track of the blocks that hold the tokens of each sequence, on the device and in the host tier.

    block table of a sequence   [ 7 | 3 | 9 ]     device block ids, in the order of its tokens
                                  │   │   └ partial: never hashed; forks share it until one of them writes to it
                                  │   └──── full and computed: findable under hash(parent hash, its token ids)
                                  └──────── full and computed; in two block tables (reference count 2)

The host tier holds blocks that left the device: those of swapped sequences (referenced), and evicted prefixes (findable
until reused). It holds a full block once, however many sequences use it.

There are block ids here, but no tensors: the copies to make are listed in `moves`, and the next plan contains them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.scheduling.block_pool import BlockPool, IntegrityError
from engine.sequence import Sequence

__all__ = ["BlockManager", "Hit", "IntegrityError", "Moves"]

_ROOT = b"tokenmill kv block 1\0"
"""Start of each hash chain; change it when the content of a block changes."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The place of a computed block: on the device, or (if `block` is None) in a slot of the host tier."""

    block: int | None
    slot: int | None = None


@dataclass
class Moves:
    """Copies to make before the next forward pass: `out`, then `into`, then `copies`; each reads before it writes.

    A target is findable at once: a sequence that finds it computes in the next forward pass at the earliest.
    """

    out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot)."""
    into: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block)."""
    copies: dict[int, int] = field(default_factory=dict)
    """Target device block → source device block."""
    slots: list[int] = field(default_factory=list)
    """Host slots whose references are released after all copies, so that nothing overwrites them before."""


class BlockManager:
    """Gives blocks of `block_size` tokens to sequences; sequences with the same prefix share blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, host_slots: int = 0, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.device = BlockPool(num_blocks, "device")
        self.host = BlockPool(host_slots, "host")
        self._moves = Moves()

    @property
    def num_blocks(self) -> int:
        return self.device.size

    @property
    def num_free(self) -> int:
        return self.device.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_hash(self, seq: Sequence, i: int) -> bytes:
        """Return the chained 128-bit hash of full block `i`, a function of all ids up to its end and the cache salt."""
        size, memo = self.block_size, seq.block_hashes
        while len(memo) <= i:
            parent = memo[-1] if memo else _root(seq.request.cache_salt)
            ids = seq.tokens[len(memo) * size : (len(memo) + 1) * size]
            memo.append(hashlib.blake2b(array("q", ids).tobytes(), key=parent, digest_size=16).digest())
        return memo[i]

    # ── finding computed blocks ───────────────────────────────────────────────────────────────────────────────────

    def match(self, seq: Sequence) -> list[Hit]:
        """Find the longest computed prefix of a waiting sequence in both tiers; the last token is left out."""
        hits: list[Hit] = []
        if self.prefix_caching and not seq.wants_prompt_logprobs:
            for i in range((seq.num_tokens - 1) // self.block_size):
                hit = self._find(self.block_hash(seq, i))
                if hit is None:
                    break
                hits.append(hit)
        return hits

    def swapped(self, seq: Sequence) -> list[Hit]:
        """Find the blocks of a swapped sequence; some may be on the device, used by other sequences or not reused."""
        full = seq.num_computed_tokens // self.block_size
        hits = [self._find(self.block_hash(seq, i)) if i < full else None for i in range(len(seq.host_table))]
        return [
            hit if hit is not None and hit.block is not None else Hit(None, slot)
            for hit, slot in zip(hits, seq.host_table, strict=True)
        ]

    def _find(self, digest: bytes) -> Hit | None:
        block = self.device.find(digest)
        if block is not None:
            return Hit(block)
        slot = self.host.find(digest)
        return None if slot is None else Hit(None, slot)

    def room_for(self, num_tokens: int, hits: list[Hit]) -> int:
        """Return how many blocks stay free if a sequence with these hits gets blocks for `num_tokens` tokens.

        A negative number is the number of blocks that are missing.
        """
        found = [hit.block for hit in hits if hit.block is not None]
        unused = sum(1 for block in found if not self.device.refs[block])
        return self.device.num_free - unused - (self.blocks_for(num_tokens) - len(found))

    # ── giving blocks to sequences ────────────────────────────────────────────────────────────────────────────────

    def adopt(self, seq: Sequence, hits: list[Hit], computed: int) -> None:
        """Start the block table of `seq` with `hits`, which hold its first `computed` tokens.

        Call `room_for` first: there must be enough free blocks.
        """
        for hit in hits:  # before `_load`, which takes free blocks and could take these
            if hit.block is not None:
                self.device.hold(hit.block)
            elif hit.slot is not None:
                self.host.hold(hit.slot)
                self._moves.slots.append(hit.slot)
        seq.block_table = [self._load(hit) for hit in hits]
        seq.num_computed_tokens = computed
        for slot in seq.host_table:
            self._moves.slots.append(slot)
        seq.host_table = []

    def _load(self, hit: Hit) -> int:
        """Return the device block of a hit; list the copy from the host tier if it is there."""
        if hit.block is not None:
            return hit.block
        block = self._take()
        if hit.slot is not None:
            self._moves.into.append((hit.slot, block))
            digest = self.host.hash_of(hit.slot)
            if digest is not None and self.prefix_caching:
                self.device.tag(block, digest)
        return block

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the block table of `seq` to `num_tokens` tokens; uncomputed tokens get blocks that it alone uses.

        Returns:
            False, and nothing is changed, if not enough blocks are free.
        """
        table, size = seq.block_table, self.block_size
        need = -(-num_tokens // size) - len(table)
        i, partial = divmod(seq.num_computed_tokens, size)
        forked = partial > 0 and self.device.refs[table[i]] > 1
        if not need and not forked:
            return True
        if need + forked > self.device.num_free:
            return False
        if forked:  # copy on write: the other sequences keep the block
            copy = self._take()
            self._moves.copies[copy] = table[i]
            self.device.release(table[i])
            table[i] = copy
        for _ in range(need):
            table.append(self._take())
        return True

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Let `child` share all computed blocks of `seq`, its partial last block included."""
        child.block_table = seq.block_table[: self.blocks_for(seq.num_computed_tokens)]
        child.num_computed_tokens = seq.num_computed_tokens
        for block in child.block_table:
            self.device.hold(block)

    def register(self, seq: Sequence, first: int, end: int) -> None:
        """Make the blocks `[first, end)` of `seq` findable; call it once they are computed and their ids are known."""
        if self.prefix_caching:
            for i in range(first, end):
                self.device.tag(seq.block_table[i], self.block_hash(seq, i))

    def _take(self) -> int:
        """Take a free device block; a prefix that it held is copied to the host tier, if a slot is free there."""
        block, digest = self.device.take()
        self._moves.copies.pop(block, None)  # the sequence that the copy was for has ended or was preempted
        if digest is not None and self.host.num_free and self.host.find(digest) is None:
            self._moves.slots.append(self._store(block, digest))
        return block

    def _store(self, block: int, digest: bytes | None) -> int:
        """Take a host slot and list the copy of a device block to it."""
        slot, _ = self.host.take()
        if digest is not None:
            self.host.tag(slot, digest)
        # If the block is itself the target of a copy that is not made yet, read its source: `copies` come after `out`.
        self._moves.out.append((self._moves.copies.get(block, block), slot))
        return slot

    # ── taking blocks from sequences ──────────────────────────────────────────────────────────────────────────────

    def free(self, seq: Sequence) -> None:
        """Release all blocks of `seq` in both tiers; none of its tokens counts as computed any more."""
        self._release(seq.block_table)
        for slot in seq.host_table:
            self.host.release(slot)
        seq.block_table, seq.host_table = [], []
        seq.num_computed_tokens = 0

    def swap_out(self, seq: Sequence) -> bool:
        """Move the blocks of `seq` to the host tier. A block that is there already is not copied again.

        A partial block that is shared with a fork is dropped: its tokens are computed again.

        Returns:
            False, and nothing is changed, if the host tier has not enough free slots.
        """
        full, partial = divmod(seq.num_computed_tokens, self.block_size)
        digests: list[bytes | None] = [self.block_hash(seq, i) for i in range(full)]
        if partial and self.device.refs[seq.block_table[full]] == 1:
            digests.append(None)
        found = [None if d is None else self.host.find(d) for d in digests]
        unused = sum(1 for slot in found if slot is not None and not self.host.refs[slot])
        if sum(1 for slot in found if slot is None) > self.host.num_free - unused:
            return False
        for slot in found:
            if slot is not None:
                self.host.hold(slot)
        computed = seq.num_computed_tokens if len(digests) > full else full * self.block_size
        seq.host_table = [
            self._store(seq.block_table[i], digests[i]) if slot is None else slot for i, slot in enumerate(found)
        ]
        self._release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = computed
        return True

    def trim(self, seq: Sequence) -> None:
        """Release the blocks after the computed tokens, which an abandoned plan had reserved."""
        keep = self.blocks_for(seq.num_computed_tokens)
        self._release(seq.block_table[keep:])
        del seq.block_table[keep:]

    def _release(self, blocks: list[int]) -> None:
        """Release blocks, the last one first, so that the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self.device.release(block)

    # ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def moves(self) -> Moves:
        """The copies to make, listed since the last call of `moved`."""
        return self._moves

    def moved(self) -> None:
        """Record that the copies were made."""
        moves, self._moves = self._moves, Moves()
        for slot in moves.slots:
            self.host.release(slot)

    def check_idle(self) -> str | None:
        """Check both tiers while no sequence is live, see `BlockPool.check_idle`."""
        found = [leak for pool in (self.device, self.host) if (leak := pool.check_idle()) is not None]
        return "; ".join(found) or None

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare the reference counts of both tiers with the block tables of all live sequences.

        Raises:
            IntegrityError: a block leaked, or a reference count is wrong.
        """
        device, host = Counter[int](), Counter[int](self._moves.slots)
        for seq in live:
            if len(set(seq.block_table)) != len(seq.block_table):
                raise IntegrityError(f"{seq!r} holds a block twice")
            if max(len(seq.block_table), len(seq.host_table)) < self.blocks_for(seq.num_computed_tokens):
                raise IntegrityError(f"{seq!r} has more computed tokens than its blocks hold")
            device.update(seq.block_table)
            host.update(seq.host_table)
        self.device.check_integrity(device)
        self.host.check_integrity(host)


def _root(salt: str) -> bytes:
    """Return the parent hash of the first block. A blake2b key has at most 64 bytes: a longer salt is hashed first."""
    root = _ROOT + salt.encode()
    return root if len(root) <= 64 else hashlib.blake2b(root, digest_size=64).digest()
