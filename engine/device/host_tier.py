"""Copies KV blocks between device and host tier, and within the device, without waiting for the device.

All copies are on the current stream, so the device makes them in order, before the kernels that are launched later: a
block may be written as soon as the copy that reads it was launched. Host memory that is not pinned is copied while the
host waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from kernels.device import upload

Pairs = Iterable[tuple[int, int]]
"""(source, target) of each copy of a block."""
_AT_ONCE = 32
"""Blocks of one launch, which needs memory for as many blocks."""


class HostTier:
    """The slots of the host tier, in one or several tensors, since pinned memory is allocated in pieces."""

    def __init__(self, pieces: Seq[Tensor]) -> None:
        """Make slots of these tensors.

        Args:
            pieces: uint8 `[slots, block_bytes]` each; slots are counted over all pieces, in their order.
        """
        self._pieces = tuple(pieces)
        self._ends = tuple(accumulate(piece.shape[0] for piece in self._pieces))

    @property
    def num_slots(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def copy_out(self, pool: Tensor, pairs: Pairs) -> None:
        """Copy blocks of the pool to slots of the host tier.

        Args:
            pool: uint8 `[num_blocks, block_bytes]`, on the device.
            pairs: (device block, host slot) of each copy.
        """
        for block, slot, count in _runs(pairs):
            for piece, start, done, length in self._parts(slot, count):
                source = pool[block + done : block + done + length]
                piece[start : start + length].copy_(source, non_blocking=True)

    def copy_in(self, pool: Tensor, pairs: Pairs) -> None:
        """Copy slots of the host tier to blocks of the pool.

        Args:
            pool: uint8 `[num_blocks, block_bytes]`, on the device.
            pairs: (host slot, device block) of each copy.
        """
        for slot, block, count in _runs(pairs):
            for piece, start, done, length in self._parts(slot, count):
                target = pool[block + done : block + done + length]
                target.copy_(piece[start : start + length], non_blocking=True)

    def _parts(self, slot: int, count: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Cut `count` slots at the ends of tensors; yield tensor, first slot in it, number of slots before, length."""
        done = 0
        while done < count:
            index = bisect_right(self._ends, slot + done)
            end = self._ends[index]
            length = min(count - done, end - slot - done)
            yield self._pieces[index], slot + done - (end - self._pieces[index].shape[0]), done, length
            done += length


def copy_blocks(pool: Tensor, pairs: Pairs) -> None:
    """Copy blocks within the pool so that all are read before any is written.

    Args:
        pool: uint8 `[num_blocks, block_bytes]`.
        pairs: (source block, target block) of each copy; the targets are distinct.
    """
    pairs = list(pairs)
    sources = {source for source, _ in pairs}
    # If a block is both source and target, one launch must read all blocks before it writes; that is rare.
    size = len(pairs) if any(target in sources for _, target in pairs) else _AT_ONCE
    indices = upload([i for pair in pairs for i in pair], torch.int64, pool.device).view(-1, 2)
    for start in range(0, len(pairs), size):
        read, write = indices[start : start + size].T
        pool.index_copy_(0, write, pool.index_select(0, read))


def _runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """Join copies of consecutive sources to consecutive targets; yield first source, first target and count."""
    source = target = count = 0
    for read, write in sorted(pairs):
        if count and (read, write) == (source + count, target + count):
            count += 1
            continue
        if count:
            yield source, target, count
        source, target, count = read, write, 1
    if count:
        yield source, target, count
