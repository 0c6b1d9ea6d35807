"""One tier of blocks: who is held how often, which are free, which of the free still hold something findable.

    free list   [ unhashed … | hashed, least recently freed … most recently freed ]
                  └ reused first    └ still findable by hash until reused: a hit revives it

The device pool and the host tier are both of this kind.
"""

from __future__ import annotations

from collections import OrderedDict


class IntegrityError(RuntimeError):
    """The books don't add up: a bug."""


class BlockPool:
    """`size` blocks, counted by reference; all operations take constant time."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.name = name
        self.refs = [0] * size
        self._hashes: list[bytes | None] = [None] * size
        self._index: dict[bytes, int] = {}
        # An OrderedDict is a doubly linked list with O(1) removal from the middle: a revived block leaves it there.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self.num_cached = 0
        """Free blocks that are still findable."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        return len(self._free)

    def find(self, digest: bytes) -> int | None:
        """The block that holds what hashes to `digest`."""
        return self._index.get(digest)

    def hash_of(self, block: int) -> bytes | None:
        """What a block is findable under."""
        return self._hashes[block]

    def tag(self, block: int, digest: bytes) -> None:
        """Make a held block findable. Where another block already is under that hash, this one stays unfindable."""
        if self._hashes[block] is None and self._index.setdefault(digest, block) == block:
            self._hashes[block] = digest

    def hold(self, block: int) -> None:
        """One more reference; revives a free block."""
        if not self.refs[block]:
            del self._free[block]
            self.num_cached -= self._hashes[block] is not None
        self.refs[block] += 1

    def take(self) -> tuple[int, bytes | None]:
        """The least valuable free block, now held once, and the hash that it was findable under until now."""
        block, _ = self._free.popitem(last=False)
        digest = self._hashes[block]
        if digest is not None:
            self._hashes[block] = None
            del self._index[digest]
            self.num_cached -= 1
        self.refs[block] = 1
        return block, digest

    def release(self, block: int) -> None:
        """One reference less; the last one frees the block, which stays findable if it was."""
        if self.refs[block] < 1:
            raise IntegrityError(f"{self.name} block {block} freed twice")
        self.refs[block] -= 1
        if not self.refs[block]:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def check_integrity(self, held: dict[int, int]) -> None:
        """Compare with `held`: block → how many references there ought to be.

        Raises:
            IntegrityError: a block leaked, is counted wrongly, or is findable under a hash that it does not have.
        """
        for block, refs in enumerate(self.refs):
            if held.get(block, 0) != refs:
                raise IntegrityError(f"{self.name} block {block}: {held.get(block, 0)} holders, {refs} references")
            if (refs == 0) != (block in self._free):
                raise IntegrityError(f"{self.name} block {block}: {refs} references, free: {block in self._free}")
        for digest, block in self._index.items():
            if self._hashes[block] != digest:
                raise IntegrityError(f"{self.name} block {block} is findable under a hash that it does not have")
        if len(self._index) != sum(1 for digest in self._hashes if digest is not None):
            raise IntegrityError(f"a hashed {self.name} block is not findable")
        if self.num_cached != sum(1 for block in self._index.values() if not self.refs[block]):
            raise IntegrityError(f"the {self.name} blocks that are free and findable are counted wrongly")
