"""Memory as numbers: which blocks hold a sequence's tokens, on the device and in the host tier.

    table of a sequence   [ 7 | 3 | 9 ]           device block ids, in the order of its tokens
                            │   │   └ partial: never hashed; shared between forks until one of them writes
                            │   └──── full and computed: findable under hash(parent hash, its token ids)
                            └──────── full and computed, perhaps in other tables too (reference count 2)

    host tier             the same for blocks that left the device: those of swapped sequences (held), and prefixes that
                          were evicted (findable until reused). A full block is there once, whoever needs it.

No tensor here: what is to be copied is listed in `moves`, which the next plan takes along.
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
"""Tags the hash chain: a change of what a block holds gets another tag."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Where computed tokens of one block are: on the device, or (block is None) in a slot of the host tier."""

    block: int | None
    slot: int | None = None


@dataclass
class Moves:
    """Copies that must be made before the next forward, in this order; each list reads before it writes.

    What they bring is findable at once: whoever finds it computes in that forward at the earliest.
    """

    out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot)."""
    into: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block)."""
    copies: dict[int, int] = field(default_factory=dict)
    """Device block to write → device block to read."""
    slots: list[int] = field(default_factory=list)
    """Host slots that are let go of once everything is copied: until then nothing may overwrite them."""


class BlockManager:
    """Blocks of `block_size` tokens, shared by reference between sequences with the same prefix."""

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
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_hash(self, seq: Sequence, i: int) -> bytes:
        """The chained 128-bit hash of full block `i`: a function of all ids up to its end and of the cache salt."""
        size, memo = self.block_size, seq.block_hashes
        while len(memo) <= i:
            parent = memo[-1] if memo else _root(seq.request.cache_salt)
            ids = seq.tokens[len(memo) * size : (len(memo) + 1) * size]
            memo.append(hashlib.blake2b(array("q", ids).tobytes(), key=parent, digest_size=16).digest())
        return memo[i]

    # ── what is there already ─────────────────────────────────────────────────────────────────────────────────────

    def match(self, seq: Sequence) -> list[Hit]:
        """The longest prefix of a waiting sequence in either tier, leaving at least one token to compute."""
        hits: list[Hit] = []
        if self.prefix_caching and not seq.wants_prompt_logprobs:
            for i in range((seq.num_tokens - 1) // self.block_size):
                hit = self._find(self.block_hash(seq, i))
                if hit is None:
                    break
                hits.append(hit)
        return hits

    def swapped(self, seq: Sequence) -> list[Hit]:
        """Where the blocks of a swapped sequence are: some may still be on the device, held by others or just freed."""
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
        """Free blocks left if a sequence with these hits got room for `num_tokens` tokens; may be negative."""
        there = [hit.block for hit in hits if hit.block is not None]
        revived = sum(1 for block in there if not self.device.refs[block])
        return self.device.num_free - revived - (self.blocks_for(num_tokens) - len(there))

    # ── giving ────────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(self, seq: Sequence, hits: list[Hit], computed: int) -> None:
        """Start the table of `seq` with `hits`, which hold its first `computed` tokens. `room_for` has said yes."""
        for hit in hits:  # held first, so that making room for the others cannot evict them
            if hit.block is not None:
                self.device.hold(hit.block)
            elif hit.slot is not None:
                self.host.hold(hit.slot)
                self._moves.slots.append(hit.slot)
        seq.block_table = [self._load(hit, seq, i) for i, hit in enumerate(hits)]
        seq.num_computed_tokens = computed
        for slot in seq.host_table:
            self._moves.slots.append(slot)
        seq.host_table = []

    def _load(self, hit: Hit, seq: Sequence, i: int) -> int:
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
        """Make the table of `seq` hold `num_tokens` tokens, all uncomputed ones in blocks that it may write.

        False, and nothing changed, if there is no room now.
        """
        table, size = seq.block_table, self.block_size
        need = -(-num_tokens // size) - len(table)
        i, partial = divmod(seq.num_computed_tokens, size)
        forked = partial > 0 and self.device.refs[table[i]] > 1
        if not need and not forked:
            return True
        if need + forked > self.device.num_free:
            return False
        if forked:  # copy on write: the block stays with whoever else holds it
            copy = self._take()
            self._moves.copies[copy] = table[i]
            self.device.release(table[i])
            table[i] = copy
        for _ in range(need):
            table.append(self._take())
        return True

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Let `child` share all computed tokens of `seq`, its partial last block included."""
        child.block_table = seq.block_table[: self.blocks_for(seq.num_computed_tokens)]
        child.num_computed_tokens = seq.num_computed_tokens
        for block in child.block_table:
            self.device.hold(block)

    def register(self, seq: Sequence, start: int) -> None:
        """Make findable the full blocks that tokens computed since `start` completed; call it after their forward."""
        if self.prefix_caching:
            for i in range(start // self.block_size, seq.num_computed_tokens // self.block_size):
                self.device.tag(seq.block_table[i], self.block_hash(seq, i))

    def _take(self) -> int:
        """A device block to write to; a prefix that it held goes to the host tier, if that has room."""
        block, digest = self.device.take()
        self._moves.copies.pop(block, None)  # whoever wanted that copy has left again
        if digest is not None and self.host.num_free and self.host.find(digest) is None:
            self._moves.slots.append(self._store(block, digest))
        return block

    def _store(self, block: int, digest: bytes | None) -> int:
        """A held host slot that the block will be copied to."""
        slot, _ = self.host.take()
        if digest is not None:
            self.host.tag(slot, digest)
        # A copy on write that is still to be made is read at its source: copies come after what goes out.
        self._moves.out.append((self._moves.copies.get(block, block), slot))
        return slot

    # ── taking away ───────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, seq: Sequence) -> None:
        """Take everything from `seq`, in both tiers; its tokens no longer count as computed."""
        self._release(seq.block_table)
        for slot in seq.host_table:
            self.host.release(slot)
        seq.block_table, seq.host_table = [], []
        seq.num_computed_tokens = 0

    def swap_out(self, seq: Sequence) -> bool:
        """Move `seq` to the host tier; False, and nothing changed, if that has no room for all of it.

        What others hold as well, and what the tier has already, is not copied again. A partial block that is shared
        with a fork is dropped: its few tokens are computed again.
        """
        full, partial = divmod(seq.num_computed_tokens, self.block_size)
        digests: list[bytes | None] = [self.block_hash(seq, i) for i in range(full)]
        if partial and self.device.refs[seq.block_table[full]] == 1:
            digests.append(None)
        there = [None if d is None else self.host.find(d) for d in digests]
        revived = sum(1 for slot in there if slot is not None and not self.host.refs[slot])
        if sum(1 for slot in there if slot is None) > self.host.num_free - revived:
            return False
        for slot in there:
            if slot is not None:
                self.host.hold(slot)
        computed = seq.num_computed_tokens if len(digests) > full else full * self.block_size
        seq.host_table = [
            self._store(seq.block_table[i], digests[i]) if slot is None else slot for i, slot in enumerate(there)
        ]
        self._release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = computed
        return True

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks past the computed tokens: what an abandoned plan had reserved."""
        keep = self.blocks_for(seq.num_computed_tokens)
        self._release(seq.block_table[keep:])
        del seq.block_table[keep:]

    def _release(self, blocks: list[int]) -> None:
        """Last block first, so that the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            self.device.release(block)

    # ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def moves(self) -> Moves:
        """The copies listed since the last `moved`."""
        return self._moves

    def moved(self) -> None:
        """The copies have been made."""
        moves, self._moves = self._moves, Moves()
        for slot in moves.slots:
            self.host.release(slot)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare the books with the tables of all live sequences.

        Raises:
            IntegrityError: something leaked or is counted wrongly, in either tier.
        """
        device, host = Counter[int](), Counter[int](self._moves.slots)
        for seq in live:
            if len(set(seq.block_table)) != len(seq.block_table):
                raise IntegrityError(f"{seq!r} holds a block twice")
            if max(len(seq.block_table), len(seq.host_table)) < self.blocks_for(seq.num_computed_tokens):
                raise IntegrityError(f"{seq!r} has computed more than its blocks hold")
            device.update(seq.block_table)
            host.update(seq.host_table)
        self.device.check_integrity(device)
        self.host.check_integrity(host)


def _root(salt: str) -> bytes:
    """The parent of the first block. blake2b takes up to 64 bytes of key, so that a longer salt is condensed first."""
    root = _ROOT + salt.encode()
    return root if len(root) <= 64 else hashlib.blake2b(root, digest_size=64).digest()
