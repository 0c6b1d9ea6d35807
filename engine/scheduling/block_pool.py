"""One tier of blocks: the reference count of each, which are free, and which free blocks are still findable by hash.

    free list   [ unhashed … | hashed, least recently freed … most recently freed ]
                  └ reused first    └ findable by hash until reused: a hit takes it off the list

The device pool and the host tier are both a `BlockPool`.
"""

from __future__ import annotations

from collections import OrderedDict

_SAMPLE = 256
"""Blocks whose hashes `BlockPool.check_idle` compares, in about 50 µs."""


class IntegrityError(RuntimeError):
    """The scheduler's records contradict each other: a bug in the engine."""


class BlockPool:
    """`size` blocks with reference counts. All operations except `check_integrity` take constant time."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.name = name
        self.refs = [0] * size
        self._hashes: list[bytes | None] = [None] * size
        self._index: dict[bytes, int] = {}
        # An OrderedDict is a doubly linked list: `hold` removes a free block from its middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._next_check = 0
        """The block at which the next `check_idle` begins."""
        self.num_cached = 0
        """Number of free blocks that are findable."""

    @property
    def num_free(self) -> int:
        """Number of blocks without a reference, findable ones included."""
        return len(self._free)

    def find(self, digest: bytes) -> int | None:
        """Return the block that is findable under this hash; None if there is none."""
        return self._index.get(digest)

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is findable; None if it is not."""
        return self._hashes[block]

    def tag(self, block: int, digest: bytes) -> None:
        """Make a held block findable under a hash, unless another block already is."""
        if self._hashes[block] is None and self._index.setdefault(digest, block) == block:
            self._hashes[block] = digest

    def hold(self, block: int) -> None:
        """Add a reference to a block, which may be free."""
        if not self.refs[block]:
            del self._free[block]
            self.num_cached -= self._hashes[block] is not None
        self.refs[block] += 1

    def take(self) -> tuple[int, bytes | None]:
        """Take the first block of the free list, with one reference.

        Returns:
            The block, and the hash under which it was findable until now, if any.

        Raises:
            KeyError: no block is free.
        """
        block, _ = self._free.popitem(last=False)
        digest = self._hashes[block]
        if digest is not None:
            self._hashes[block] = None
            del self._index[digest]
            self.num_cached -= 1
        self.refs[block] = 1
        return block, digest

    def release(self, block: int) -> None:
        """Remove a reference; without references the block is free, and stays findable if it was.

        Raises:
            IntegrityError: the block has no reference.
        """
        if self.refs[block] < 1:
            raise IntegrityError(f"{self.name} block {block} freed twice")
        self.refs[block] -= 1
        if not self.refs[block]:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def check_idle(self) -> str | None:
        """Check that all blocks of a pool that no sequence uses are free, and are findable under their own hash only.

        The hashes of `_SAMPLE` blocks are checked, those after the blocks that the last call checked.

        Returns:
            A message with the number of leaked blocks; None if no block leaked.

        Raises:
            IntegrityError: a block is findable under a hash that is not its own, so a prefix hit would give wrong text.
        """
        for _ in range(min(self.size, _SAMPLE)):
            block, self._next_check = self._next_check, (self._next_check + 1) % self.size
            digest = self._hashes[block]
            if digest is not None and self._index.get(digest) != block:
                raise IntegrityError(f"{self.name} block {block} has a hash under which another block is found")
        leaked = self.size - self.num_free
        if not leaked and len(self._index) != self.num_cached:
            raise IntegrityError(f"{len(self._index)} {self.name} blocks are findable, {self.num_cached} have a hash")
        return f"{leaked} of {self.size} {self.name} blocks are held by no sequence and not free" if leaked else None

    def check_integrity(self, held: dict[int, int]) -> None:
        """Compare the pool with the references that its users have. Takes time linear in the pool.

        Args:
            held: block → number of references.

        Raises:
            IntegrityError: a block leaked, a count is wrong, or a block is findable under a hash that it does not have.
        """
        for block, refs in enumerate(self.refs):
            if held.get(block, 0) != refs:
                raise IntegrityError(f"{self.name} block {block}: held {held.get(block, 0)} times, {refs} references")
            if (refs == 0) != (block in self._free):
                raise IntegrityError(f"{self.name} block {block}: {refs} references, free: {block in self._free}")
        for digest, block in self._index.items():
            if self._hashes[block] != digest:
                raise IntegrityError(f"{self.name} block {block} is findable under a hash that it does not have")
        if len(self._index) != sum(1 for digest in self._hashes if digest is not None):
            raise IntegrityError(f"a hashed {self.name} block is not findable")
        if self.num_cached != sum(1 for block in self._index.values() if not self.refs[block]):
            raise IntegrityError(f"the {self.name} blocks that are free and findable are counted wrongly")
