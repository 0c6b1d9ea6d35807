"""The queue of WAITING sequences, some of which are parked until a running sequence has computed their prefix."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from engine.scheduling.block_pool import IntegrityError
from engine.sequence import Rank, Sequence, SequenceStatus


class WaitingQueue:
    """WAITING sequences in the order of `Sequence.rank`. Entries of ended sequences may stay; they are skipped.

    A parked sequence counts as waiting, but `peek` does not return it: a running sequence is about to compute the next
    block of its prefix (`will_compute`), so it waits until the block is `computed` or the running sequence
    `stops_computing`, rather than compute the same block. No operation scans the queue.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of waiting sequences, parked ones included."""
        self._heap: list[tuple[Rank, Sequence]] = []
        self._computing: dict[bytes, Sequence] = {}
        """Hash of a prefix block → the running sequence that is about to compute it."""
        self._parked: dict[bytes, list[Sequence]] = {}
        """Hash of a prefix block → the sequences that wait for it."""

    def __bool__(self) -> bool:
        return self.count > 0

    def push(self, seq: Sequence) -> None:
        """Add a sequence that was not waiting."""
        self.count += 1
        heapq.heappush(self._heap, (seq.rank, seq))

    def note_left(self) -> None:
        """Record that a waiting sequence has ended or was admitted."""
        self.count -= 1
        if len(self._heap) > 2 * self.count + 16 or not self.count:
            self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        """Return the first sequence that is not parked; None if there is none."""
        while self._heap and self._heap[0][1].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Remove the sequence that `peek` returned; it still counts as waiting."""
        heapq.heappop(self._heap)

    def put_back(self, seq: Sequence) -> None:
        """Return a popped or parked sequence to the queue, unless it no longer waits."""
        if seq.status is SequenceStatus.WAITING:
            heapq.heappush(self._heap, (seq.rank, seq))

    # ── prefixes that running sequences compute ───────────────────────────────────────────────────────────────────

    def will_compute(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """Record that a running sequence is about to compute the prefix blocks with these hashes."""
        for digest in digests:
            self._computing.setdefault(digest, seq)

    def computed(self, digests: Iterable[bytes]) -> None:
        """Put back the sequences that are parked for these blocks, which can be found now."""
        for digest in digests:
            self._release(digest)

    def stops_computing(self, seq: Sequence) -> None:
        """Put back the sequences that are parked for blocks of `seq`, which no longer runs."""
        for digest in [digest for digest, owner in self._computing.items() if owner is seq]:
            self._release(digest)

    def park(self, digest: bytes) -> bool:
        """Park the first sequence until this block is computed.

        Returns:
            False, and nothing is changed, if no running sequence is about to compute the block.
        """
        seq = self.peek()
        if seq is None or digest not in self._computing:
            return False
        self.pop()
        self._parked.setdefault(digest, []).append(seq)
        return True

    def _release(self, digest: bytes) -> None:
        self._computing.pop(digest, None)
        for seq in self._parked.pop(digest, ()):
            self.put_back(seq)

    def check_integrity(self) -> None:
        """Check the count of waiting sequences and that each parked sequence waits for a running one.

        Raises:
            IntegrityError: the count is wrong, or no running sequence computes a block that a sequence waits for.
        """
        if self.count != len(list(self)):
            raise IntegrityError(f"{self.count} sequences are counted as waiting, {len(list(self))} are")
        if any(owner.status is not SequenceStatus.RUNNING for owner in self._computing.values()):
            raise IntegrityError("a prefix block is listed as being computed by a sequence that does not run")
        if not set(self._parked) <= set(self._computing):
            raise IntegrityError("a sequence is parked for a prefix block that no sequence computes")

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, parked ones included, in no order; for self-checks."""
        groups = [[seq for _, seq in self._heap], *self._parked.values()]
        return (seq for group in groups for seq in group if seq.status is SequenceStatus.WAITING)
