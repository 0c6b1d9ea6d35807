"""The KV pool as numbers: who holds which block, which blocks are free, and which still hold a findable prefix.

    table of a sequence   [ 7 | 3 | 9 ]           block ids, in the order of its tokens
                            │   │   └ partial: never hashed, never shared
                            │   └──── full and computed: findable under hash(parent hash, its token ids)
                            └──────── full and computed, perhaps in other tables too (reference count 2)

    free list             [ unhashed … | hashed, least recently freed … most recently freed ]
                            └ reused first            └ still findable until reused: a hit revives it

No tensor here, and no wish of a scheduler: `allocate` answers whether there is room now, and changes nothing if not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from engine.sequence import Sequence

_ROOT = b"tokenmill kv block 1\0"
"""Tags the hash chain: a change of what a block holds gets another tag."""


class IntegrityError(RuntimeError):
    """The books of the pool don't add up: a bug."""


class BlockManager:
    """Blocks of `block_size` tokens, shared by reference between sequences with the same prefix."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # An OrderedDict is a doubly linked list with O(1) removal from the middle: a revived block leaves it there.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a findable prefix."""
        return sum(1 for block in self._index.values() if not self._refs[block])

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_hash(self, seq: Sequence, i: int) -> bytes:
        """The chained 128-bit hash of full block `i`: a function of all ids up to its end and of the cache salt."""
        size, memo = self.block_size, seq.block_hashes
        while len(memo) <= i:
            parent = memo[-1] if memo else _ROOT + seq.request.cache_salt.encode()
            ids = seq.tokens[len(memo) * size : (len(memo) + 1) * size]
            memo.append(hashlib.blake2b(array("q", ids).tobytes(), key=_key(parent), digest_size=16).digest())
        return memo[i]

    def match(self, seq: Sequence) -> list[int]:
        """The blocks that already hold the longest prefix of `seq`, leaving at least one token to compute."""
        hits: list[int] = []
        if self.prefix_caching:
            for i in range((seq.num_tokens - 1) // self.block_size):
                block = self._index.get(self.block_hash(seq, i))
                if block is None:
                    break
                hits.append(block)
        return hits

    def room_for(self, num_tokens: int, hits: list[int]) -> int:
        """Free blocks left if a new sequence with these hits got room for `num_tokens` tokens; may be negative."""
        revived = sum(1 for block in hits if not self._refs[block])
        return len(self._free) - revived - (self.blocks_for(num_tokens) - len(hits))

    def adopt(self, seq: Sequence, hits: list[int]) -> None:
        """Start the table of `seq` with blocks that `match` found: their tokens count as computed."""
        for block in hits:
            if not self._refs[block]:
                del self._free[block]
            self._refs[block] += 1
        seq.block_table = list(hits)
        seq.num_computed_tokens = len(hits) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the table of `seq` to hold `num_tokens` tokens; False, and nothing changed, if there is no room now."""
        need = self.blocks_for(num_tokens) - len(seq.block_table)
        if need > len(self._free):
            return False
        for _ in range(need):
            seq.block_table.append(self._take())
        return True

    def register(self, seq: Sequence, start: int) -> None:
        """Make findable the full blocks that tokens computed since `start` completed; call it after their forward."""
        if not self.prefix_caching:
            return
        for i in range(start // self.block_size, seq.num_computed_tokens // self.block_size):
            block = seq.block_table[i]
            if self._hashes[block] is None:
                digest = self.block_hash(seq, i)
                # Where another block already holds the same tokens, this one stays unfindable and is reused first.
                if self._index.setdefault(digest, block) == block:
                    self._hashes[block] = digest

    def free(self, seq: Sequence) -> None:
        """Take everything from `seq`; its tokens no longer count as computed."""
        self._release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = 0

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks past the computed tokens: what an abandoned plan had reserved."""
        keep = self.blocks_for(seq.num_computed_tokens)
        self._release(seq.block_table[keep:])
        del seq.block_table[keep:]

    def is_registered(self, digest: bytes) -> bool:
        return digest in self._index

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._hashes[block]
        if digest is not None:
            self._hashes[block] = None
            del self._index[digest]
        self._refs[block] = 1
        return block

    def _release(self, blocks: list[int]) -> None:
        """Last block first, so that the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise IntegrityError(f"block {block} freed twice")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare the books with the tables of all live sequences.

        Raises:
            IntegrityError: a block leaked, is counted wrongly, or is findable under a hash that it does not hold.
        """
        held = Counter[int]()
        for seq in live:
            if len(set(seq.block_table)) != len(seq.block_table):
                raise IntegrityError(f"{seq!r} holds a block twice")
            if len(seq.block_table) < self.blocks_for(seq.num_computed_tokens):
                raise IntegrityError(f"{seq!r} has computed more than its blocks hold")
            held.update(seq.block_table)
        for block in range(self.num_blocks):
            if held[block] != self._refs[block]:
                raise IntegrityError(f"block {block}: {held[block]} tables, {self._refs[block]} references")
            if (self._refs[block] == 0) != (block in self._free):
                raise IntegrityError(f"block {block}: {self._refs[block]} references, free: {block in self._free}")
        for digest, block in self._index.items():
            if self._hashes[block] != digest:
                raise IntegrityError(f"block {block} is findable under a hash that it does not hold")
        if len(self._index) != sum(1 for digest in self._hashes if digest is not None):
            raise IntegrityError("a hashed block is not findable")


def _key(parent: bytes) -> bytes:
    """blake2b takes up to 64 bytes of key; a longer root (a long salt) is condensed first."""
    return parent if len(parent) <= 64 else hashlib.blake2b(parent, digest_size=64).digest()
