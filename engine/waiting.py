"""The waiting queue: who is next, who waits behind a prefix that another computes, who waits to be forked."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine import policy
from engine.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """WAITING sequences in the order of `policy.rank`. Ended ones may leave entries behind, which are skipped.

    Parked sequences wait too, but are not offered: `park` puts them behind the hash of a prefix block that a running
    sequence is about to compute, `release` brings them back. Nothing here scans the queue.
    """

    def __init__(self) -> None:
        self.count = 0
        """Sequences that wait, parked ones included."""
        self._heap: list[tuple[policy.Rank, Sequence]] = []
        self._parked: dict[bytes, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return self.count > 0

    def push(self, seq: Sequence) -> None:
        """Add a sequence that was not waiting."""
        self.count += 1
        heapq.heappush(self._heap, (policy.rank(seq), seq))

    def left(self) -> None:
        """A sequence that was counted here has ended or has been admitted."""
        self.count -= 1
        if len(self._heap) > 2 * self.count + 16 or not self.count:
            self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        """Who is next; None if nobody is on offer."""
        while self._heap and self._heap[0][1].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take away what `peek` showed; it still counts as waiting."""
        heapq.heappop(self._heap)

    def put_back(self, seq: Sequence) -> None:
        """Offer again what was popped or parked."""
        if seq.status is SequenceStatus.WAITING:
            heapq.heappush(self._heap, (policy.rank(seq), seq))

    def park(self, seq: Sequence, digest: bytes) -> None:
        """Let a popped sequence wait until the block of this hash is computed, or will not be."""
        self._parked.setdefault(digest, []).append(seq)

    def release(self, digest: bytes) -> None:
        """Offer those who were parked behind this hash."""
        for seq in self._parked.pop(digest, ()):
            self.put_back(seq)

    @property
    def parked_behind(self) -> set[bytes]:
        return set(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order (for self-checks)."""
        groups = [[seq for _, seq in self._heap], *self._parked.values()]
        return (seq for group in groups for seq in group if seq.status is SequenceStatus.WAITING)
